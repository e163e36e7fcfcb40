#!/bin/sh
# stop.sh MODE KIND ROOT START SESSION WAITER PID START MARKER FILE FILE - finds what belongs to
# the command of one wrapper.sh, and ends or signals it (contract W4, W11-W18).
#
# Run by the code uid as an exec of its own. KIND is the wrapper's mode, the words after it are
# those of its reports. MODE is one of
#   command     end the command; the wrapper stays, goes on if it was stopped, and reports
#   all         the wrapper goes too, so that nothing can start any more
#   signal:N    send a signal to the command's group
#   wait:N      wait N tenths of a second for the command's end, and say its exit code; until
#               then the shell that would take it is stopped, so that it is not missed, unless
#               another stop continues that shell meanwhile: then it says no code
#
# Says one line last and ends with 0:  killed | sent | ended CODE | running | nothing | gone
# preceded, where it applies, by  survivor PID | holder PID | unreadable PID
# `gone` means that ROOT has ended, and that nothing that it left behind was found. Each pass
# freezes nothing: it kills what it sees, and looks again until it sees nothing, a limited number
# of times.
#
# What belongs to the command: what is below ROOT, which as child subreaper loses nobody. Where
# ROOT has gone or is a plain shell, also what has MARKER among its variables, and what has no
# marker at all but the command's session or its output. A number is believed only while the
# process that it names has the start time that was reported, so that it cannot mean a stranger.
#
# Starts no process but an `ls` to see who holds the output, and `sleep` to wait.
# shellcheck disable=SC2015 # A && B || C is meant as it reads
# shellcheck disable=SC2086 # lists of pids are meant to be split
set -u
mode=$1 kind=$2 root=$3 root_start=$4 wrapper_session=$5 waiter=$6 leader=$7 leader_start=$8
shift 8
marker=$1 out=$2 err=$3
variable=SANDBOX_KERNEL_COMMAND
rounds=200
newline='
'

# see PID: state, parent, group, session, start time and wait status of one process.
see() {
    whole=''
    { while IFS= read -r line; do whole="$whole $line"; done <"/proc/$1/stat"; } 2>/dev/null
    [ -n "$whole" ] || return 1
    set -- ${whole##*) }
    state=$1 parent=$2 group=$3 session=$4
    shift 17
    threads=$1 started=$3
    [ "$#" -lt 33 ] || shift 32
    status=$1
}
# dead: whether the process that was seen has ended. One whose first thread has ended looks so
# too, while its other threads go on.
dead() { case $state:$threads in [ZX]:[01]) ;; *) return 1 ;; esac }
# look PID: see a live process.
look() { see "$1" && ! dead; }
# still PID START: whether a number cannot by now mean another process than it did.
still() { ! look "$1" || [ "$started" = "$2" ]; }
# mine PID: whether a process is of this user; the owner of its directory does not tell that.
mine() {
    uid=''
    { while read -r word first _; do [ "$word" != Uid: ] || uid=$first; done <"/proc/$1/status"; } 2>/dev/null
    [ "$uid" = "$user" ]
}
# marked PID: 0 with our marker, 1 with none, 2 with that of another command.
marked() {
    whole='' line=''
    { while IFS= read -r line; do whole=$whole$line; done <"/proc/$1/environ"; } 2>/dev/null
    case $whole$line in
    *"$variable=$marker"*) return 0 ;;
    *"$variable="*) return 2 ;;
    *) return 1 ;;
    esac
}
# orphan PID SESSION: whether a process outside of the tree belongs to the command.
orphan() {
    case $judged in
    *" $1+ "*) return 0 ;;
    *" $1- "*) return 1 ;;
    esac
    sign=-
    if mine "$1"; then
        marked "$1"
        case $?:$2 in 0:* | 1:"$own" | 1:"$wrappers") sign=+ ;; esac
    fi
    judged="$judged$1$sign "
    [ "$sign" = + ]
}

# collect: the command's processes into $found, those of the wrapper into $kept.
collect() {
    table=''
    for directory in /proc/[0-9]*; do
        id=${directory#/proc/}
        look "$id" && table="$table $id:$parent:$session"
    done
    below=' ' found='' kept=''
    [ "$present" -eq 0 ] || { below=" $root " && kept=$root; }
    grown=1
    while [ "$grown" -eq 1 ]; do
        grown=0
        for entry in $table; do
            id=${entry%%:*} session=${entry##*:} parent=${entry#*:}
            parent=${parent%:*}
            case $below in *" $id "*) continue ;; esac
            [ "$id" != "$me" ] || continue
            case $below in
            *" $parent "*) ;;
            *) [ "$thorough" -eq 1 ] && orphan "$id" "$session" || continue ;;
            esac
            below="$below$id "
            grown=1
            if [ "$mode" = all ]; then
                found="$found $id"
            elif [ "$kind" = terminal ] && [ "$id" = "$waiter" ] ||
                [ "$kind" = pipes ] && [ "$session" = "$wrapper_session" ]; then
                kept="$kept $id"
            else
                found="$found $id"
            fi
        done
    done
}

# holders: who else has the output open, as lines into $held; orphans that do into $found.
holders() {
    held='' found='' others='' folders=''
    for directory in /proc/[0-9]*; do
        id=${directory#/proc/}
        # Processes of other users cannot be holders: nothing of theirs takes files from this one.
        case " $kept $me " in *" $id "*) continue ;; esac
        mine "$id" && look "$id" || continue
        if [ -r "$directory/fd" ]; then
            others="$others $id" folders="$folders $directory/fd"
        else
            held="${held}unreadable $id$newline"
        fi
    done
    [ -n "$others" ] && holds $folders || return 0
    for id in $others; do
        holds "/proc/$id/fd" || continue
        if [ "$thorough" -eq 1 ]; then
            marked "$id"
            [ $? -eq 2 ] || { found="$found $id" && continue; }
        fi
        held="${held}holder $id$newline"
    done
}
# holds FOLDER...: whether one of the output's two files is open there.
holds() {
    links=$(exec ls -l "$@" 2>/dev/null)$newline
    case $links in *"-> $out$newline"* | *"-> $err$newline"*) return 0 ;; esac
    return 1
}

read -r me _ </proc/self/stat
user=''
while read -r word first _; do [ "$word" != Uid: ] || user=$first; done </proc/self/status
judged=' ' own=none wrappers=none
present=0
look "$root" && [ "$started" = "$root_start" ] && present=1

case $mode in
wait:*)
    rounds=${mode#wait:} shell=''
    while see "$leader" && [ "$started" = "$leader_start" ]; do
        [ -n "$shell" ] || { shell=$parent && kill -STOP "$shell" 2>/dev/null; }
        if dead; then
            kill -CONT "$shell" 2>/dev/null
            # As `wait` has it: a signal, or the code above it.
            [ $((status & 127)) -eq 0 ] && code=$((status >> 8)) || code=$((128 + (status & 127)))
            echo "ended $code"
            exit 0
        fi
        [ "$rounds" -gt 0 ] || break
        rounds=$((rounds - 1))
        sleep 0.1
    done
    [ -z "$shell" ] || kill -CONT "$shell" 2>/dev/null
    # Without its own process the command runs on in who holds its output. A wrapper that was
    # continued by another stop, which took the code, ends in a moment.
    while look "$root" && [ "$started" = "$root_start" ]; do
        [ "$rounds" -gt 0 ] || {
            echo running
            exit 0
        }
        rounds=$((rounds - 1))
        sleep 0.1
    done
    echo gone
    exit 0
    ;;
signal:*)
    number=${mode#signal:}
    if [ "$kind" = terminal ]; then
        # The waiter is in the terminal's group too, and has to stay.
        look "$waiter" && [ "$present" -eq 1 ] || number=0
        waiters=$group sent=0
        [ "$number" -eq 0 ] || for directory in /proc/[0-9]*; do
            id=${directory#/proc/}
            look "$id" && [ "$group" = "$waiters" ] || continue
            case " $root $waiter " in *" $id "*) continue ;; esac
            kill "-$number" "$id" 2>/dev/null && sent=1
        done
    else
        sent=1
        still "$leader" "$leader_start" && kill "-$number" "-$leader" 2>/dev/null || sent=0
    fi
    if [ "$sent" -eq 1 ]; then echo sent; else echo nothing; fi
    exit 0
    ;;
esac

thorough=0
[ "$present" -eq 1 ] && [ "$root" != "$waiter" ] || thorough=1
if [ "$kind" = pipes ] && still "$leader" "$leader_start"; then own=$leader; fi
# Of a wrapper without its root no report comes any more.
[ "$present" -eq 1 ] || mode=all
if [ "$mode" = all ] || [ "$kind" = terminal ]; then
    still "$root" "$root_start" && wrappers=$wrapper_session
fi
# Stopped it cannot end, and so it keeps hold of its descendants until they are gone.
[ "$mode" = all ] && [ "$present" -eq 1 ] && kill -STOP "$root" 2>/dev/null

killed=0
while :; do
    collect
    while [ -n "$found" ] && [ "$rounds" -gt 0 ]; do
        kill -9 $found 2>/dev/null
        killed=1 rounds=$((rounds - 1))
        collect
    done
    for id in $found; do echo "survivor $id"; done
    held=''
    [ "$kind" = pipes ] || break
    holders
    [ -n "$found" ] && [ "$rounds" -gt 0 ] || break
    kill -9 $found 2>/dev/null
    killed=1 rounds=$((rounds - 1))
done
printf %s "$held"
if [ "$mode" = all ]; then
    [ "$present" -eq 0 ] || kill -9 "$root" 2>/dev/null
else
    kill -CONT $kept 2>/dev/null
fi
if [ "$killed" -eq 1 ]; then
    echo killed
elif [ "$present" -eq 1 ]; then
    echo nothing
else
    echo gone
fi

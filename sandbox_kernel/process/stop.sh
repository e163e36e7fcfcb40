#!/bin/sh
# stop.sh MODE ROOT START PID PIPE PIPE - ends what one wrapper.sh runs (contract W11-W18).
#
# Run by the code uid as an exec of its own. MODE is "command" (the wrapper stays and reports the
# status) or "all" (the wrapper goes too, so that nothing can start any more). ROOT and START name
# the wrapper's topmost process, PID the command, which leads a session.
#
# Says one line and ends with 0:  killed | nothing | gone
# preceded, where it applies, by  survivor PID | holder PID | unreadable PID
# `gone` means that ROOT has ended. Each pass freezes nothing: it kills what it sees, and looks
# again until it sees nothing, at most ROUNDS times.
#
# Starts no process but one `readlink` for each open file that it has to look at.
# shellcheck disable=SC2015 # A && B || C is meant as it reads
set -u
mode=$1 root=$2 start=$3 leader=$4 out=$5 err=$6
rounds=200

# look PID: state, parent, session, started of one process; fails when it is gone.
look() {
    whole=''
    { while IFS= read -r line; do whole="$whole $line"; done <"/proc/$1/stat"; } 2>/dev/null
    [ -n "$whole" ] || return 1
    # shellcheck disable=SC2086 # into fields
    set -- ${whole##*) }
    state=$1 parent=$2 session=$4
    shift 19
    started=$1
}

look "$root" && [ "$started" = "$start" ] || {
    echo gone
    exit 0
}
wrapper_session=$session
read -r me _ </proc/self/stat
user=''
while read -r word first _; do [ "$word" != Uid: ] || user=$first; done </proc/self/status

# mine PID: whether a process is of this user; the owner of its directory does not tell that.
mine() {
    uid=''
    { while read -r word first _; do [ "$word" != Uid: ] || uid=$first; done <"/proc/$1/status"; } 2>/dev/null
    [ "$uid" = "$user" ]
}

# collect: the command's processes into $found.
collect() {
    table=''
    for directory in /proc/[0-9]*; do
        id=${directory#/proc/}
        look "$id" || continue
        [ "$state" != Z ] && [ "$state" != X ] || continue
        table="$table $id:$parent:$session"
    done
    below=" $root "
    found=''
    grown=1
    while [ "$grown" -eq 1 ]; do
        grown=0
        for entry in $table; do
            id=${entry%%:*}
            session=${entry##*:}
            parent=${entry#*:}
            parent=${parent%:*}
            case $below in *" $id "*) continue ;; esac
            case $below in
            *" $parent "*) ;;
            *)
                # Re-parented: known by its session. A wrapper that is being ended loses its
                # topmost process first.
                [ "$session" = "$leader" ] ||
                    { [ "$mode" = all ] && [ "$session" = "$wrapper_session" ]; } || continue
                ;;
            esac
            below="$below$id "
            grown=1
            [ "$id" != "$me" ] || continue
            if [ "$mode" = all ] || [ "$session" != "$wrapper_session" ]; then
                found="$found $id"
            fi
        done
    done
}

killed=0
[ "$mode" != all ] || kill -9 "$root" 2>/dev/null
while [ "$rounds" -gt 0 ]; do
    collect
    [ -n "$found" ] || break
    # shellcheck disable=SC2086 # pids
    kill -9 $found 2>/dev/null
    killed=1
    rounds=$((rounds - 1))
done
for id in $found; do echo "survivor $id"; done

for directory in /proc/[0-9]*; do
    id=${directory#/proc/}
    # Processes of other users cannot be holders: nothing of theirs takes files from this one.
    mine "$id" && look "$id" && [ "$state" != Z ] || continue
    [ "$session" != "$wrapper_session" ] && [ "$id" != "$me" ] || continue
    [ -r "$directory/fd" ] || {
        echo "unreadable $id"
        continue
    }
    for file in "$directory"/fd/*; do
        link=$(readlink "$file" 2>/dev/null) || continue
        if [ "$link" = "$out" ] || [ "$link" = "$err" ]; then
            echo "holder $id"
            break
        fi
    done
done
if [ "$killed" -eq 1 ]; then echo killed; else echo nothing; fi

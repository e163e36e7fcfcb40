#!/bin/sh
# wrapper.sh MODE [TEXT] - runs one command and accounts for it (design contract W1-W24).
#
# Run by the code uid, below the engine's init as `INIT -s -- sh -c TEXT wrapper MODE`, or as
# `sh -c TEXT wrapper MODE TEXT`, which looks for an init by itself and does without if there is
# none. MODE is "pipes" or "terminal". Nothing about the command stands in this argv, because the engine shows an exec's argv to everybody who
# watches its events. stdin brings, each as a count of lines and then the lines: nonce, working
# directory, "stay" or nothing, number of variables, each NAME=VALUE, number of words, each word of
# the command. The report "ready" is answered by the line "go" or by the end of input; what follows
# "go" is the command's own stdin. With "stay" the wrapper waits, after its command's end, for the
# end of input: until then what the command has left stays below ROOT, where a stop finds it. On a terminal the preamble may come only after "hello", which says that
# the terminal takes bytes as they are, and the command's input only after "running".
#
# Reports are lines on stderr: \036 NONCE SPACE words. The nonce is in no argv, environment or
# file. Each is one write below PIPE_BUF, so that none is ever torn.
#   hello                   (terminal only, and without a nonce) the preamble may come
#   failed WORDS            nothing runs; exit code 126 (127 for a command that is not there)
#   holds FILE FILE         what the command's stdout and stderr are connected to
#   ready ROOT START SESSION WAITER PID START
#                           ROOT: the process above everything, with its start time and session;
#                           WAITER: this shell; PID: the command, with its start time
#   running                 (terminal only) what comes now is the command's input
#   exit CODE OOM OOM REFUSED REFUSED PEAK
#                           the command's own process has ended; how many processes of the sandbox
#                           had been killed for lack of memory, and how many forks refused, before
#                           and after; the peak of the sandbox's memory; each is - when unknown
#   cpu UNIT BEFORE AFTER   the processor time of the sandbox, in us or ns; - when unknown
#   left                    something lies in /output
#   full PLACE              the command failed, and this place has no room left
#
# Processes: ROOT is the engine's init as child subreaper where the image has it, and this shell
# otherwise. Between the command and the engine stand two `cat`s, which end when the last holder
# of their pipe closes it: nothing polls. The command is in a session of its own, everything of
# the wrapper is in the exec's; no process can enter a session that exists, so that a stop can
# tell the two apart without a list of pids. On a terminal there is one session, which is the
# terminal's, no `cat`, and no waiting for those who hold it: a terminal goes with its command.
#
# What it does not do: write any file, trust one, signal anything, or keep its nonce, its memory
# and its life from processes of the same uid. A command that goes for those can make the host
# believe a wrong code or end of this command, and no more: see `verdict.py`.
# shellcheck disable=SC2015 # A && B || C is meant as it reads
set -u
mode=$1
root=$PPID
if [ "$#" -eq 2 ]; then
    for init in /sbin/docker-init /run/podman-init /dev/init; do
        if [ -x "$init" ]; then
            exec "$init" -s -- sh -c "$2" wrapper "$mode"
        fi
    done
    root=$$
fi

newline='
'
nonce='' patience='' path=${PATH-}
report() { printf '\036%s %s\n' "$nonce" "$*" >&4; }
give_up() {
    report "failed $1"
    exit "${2:-126}"
}
# take: the next value into $value. Anything but a count is the host's way to call it off.
take() {
    IFS= read -r ${patience:+"$patience"} lines || exit 126
    case $lines in '' | *[!0-9]*) exit 126 ;; esac
    value=''
    while [ "$lines" -gt 0 ]; do
        IFS= read -r ${patience:+"$patience"} line || exit 126
        value=$value$line
        lines=$((lines - 1))
        [ "$lines" -eq 0 ] || value=$value$newline
    done
}
# own_stat PID: its session and start time; the name in between may hold anything.
own_stat() {
    whole=''
    while IFS= read -r line; do whole="$whole $line"; done <"/proc/$1/stat"
    # shellcheck disable=SC2086 # into fields
    set -- ${whole##*) }
    session=$4
    shift 19
    started=$1
}
# identify FD: what it is, as `ls` shows it, into $file; without `ls` where the kernel tells.
identify() {
    count ino: "/proc/self/fdinfo/$1"
    if [ "$count" != - ] && [ -p "/proc/self/fd/$1" ]; then
        file="pipe:[$count]"
    else
        file=$(exec ls -l "/proc/$self/fd/$1") || give_up "no output"
        file=${file##* }
    fi
}
# find NAME: the program along $path into $found, without a process of its own.
find() {
    found='' ifs=$IFS IFS=:
    set -f
    for folder in $path; do
        if [ -f "${folder:-.}/$1" ] && [ -x "${folder:-.}/$1" ]; then
            found=${folder:-.}/$1
            break
        fi
    done
    set +f
    IFS=$ifs
    [ -n "$found" ]
}
# need NAME: a program of the image.
need() {
    find "$1" || {
        echo "sandbox-kernel: the image lacks the program $1" >&2
        give_up "missing $1"
    }
}
# count KEY FILE: the last number that one of the kernel's files has after a key, into $count.
count() {
    count=-
    { while read -r key value _; do [ "$key" != "$1" ] || count=$value; done <"$2"; } 2>/dev/null
}
# refusals: what the kernel has counted up to now, by cgroup v2 or v1; processor time with it.
refusals() {
    count oom_kill /sys/fs/cgroup/memory.events
    [ "$count" != - ] || count oom_kill /sys/fs/cgroup/memory/memory.oom_control
    killed=$count
    count max /sys/fs/cgroup/pids.events
    [ "$count" != - ] || count max /sys/fs/cgroup/pids/pids.events
    refused=$count
    unit=us
    count usage_usec /sys/fs/cgroup/cpu.stat
    if [ "$count" = - ]; then
        unit=ns
        { read -r count </sys/fs/cgroup/cpuacct/cpuacct.usage; } 2>/dev/null || count=-
    fi
    used=$count
}

# become VARIABLE... -- WORD...: in the command's own process, up to its exec.
become() {
    read -r self _ </proc/self/stat
    own_stat "$self" && self_started=$started
    own_stat "$root"
    identify 1 && out=$file
    identify 2 && err=$file
    cd "$directory" 2>/dev/null || give_up "directory"
    case $program in
    */*)
        [ -e "$program" ] || give_up "not-found" 127
        [ -f "$program" ] && [ -x "$program" ] || give_up "not-executable"
        ;;
    *) find "$program" || give_up "not-found" 127 ;;
    esac
    report "holds $out $err"
    report "ready $root $started $session $$ $self $self_started"
    read -r ${patience:+"$patience"} answer && [ "$answer" = go ] || exit 126
    if [ "$mode" = terminal ]; then
        stty sane
        report running
    fi
    unset nonce
    # Last, and without a name of this shell's own, since the variables can have any name.
    while [ "$1" != -- ]; do
        # shellcheck disable=SC2163 # NAME=VALUE
        export "$1" 2>/dev/null
        shift
    done
    shift
    exec "$@" 3>&- 4>&-
}

# account CODE: the command has ended. The report comes first, since whatever needs a process
# may fail at the limit of processes and then ends this shell.
account() {
    killed_before=$killed refused_before=$refused used_before=$used
    refusals
    count=-
    for file in /sys/fs/cgroup/memory.peak /sys/fs/cgroup/memory/memory.max_usage_in_bytes; do
        { read -r count <"$file"; } 2>/dev/null && break
    done
    report "exit $1 $killed_before $killed $refused_before $refused $count"
    [ "$mode" = terminal ] || echo "$1" >&7
    report "cpu $unit $used_before $used"
    for place in /output/* /output/.[!.]*; do
        [ -e "$place" ] || [ -L "$place" ] || continue
        report left
        break
    done
    [ "$1" -ne 0 ] || return 0
    for place in "$directory" /tmp "${HOME:-/tmp}" /dev/shm; do
        [ -w "$place" ] || continue
        case $(exec stat -f -c ' %a/%b %d/%c' "$place" 2>/dev/null) in
        *' 0/'[1-9]*)
            case $place in *[!A-Za-z0-9/._-]*) place='the working directory' ;; esac
            report "full $place"
            ;;
        esac
    done
}

exec 3>&1 4>&2
if [ "$mode" = terminal ]; then
    # Bytes as they are. Should the host have gone, ten silent seconds are the end of input: by
    # the terminal, or by a shell that does not read before it is told that it can.
    need stty
    stty raw -echo min 0 time 100 || give_up "no terminal"
    # shellcheck disable=SC3045 # whether `read -t` exists is the question
    read -r -t 1 _ </dev/null 2>/dev/null
    [ $? -gt 1 ] || patience=-t10
    report hello
fi
take && nonce=$value
take && directory=$value
take && stay=$value
[ -r /proc/self/stat ] || give_up "missing /proc"
for program in cat ls readlink setsid; do need "$program"; done
take && count=$value
set --
while [ "$count" -gt 0 ]; do
    take
    set -- "$@" "$value"
    case $value in PATH=*) path=${value#PATH=} ;; esac
    count=$((count - 1))
done
set -- "$@" --
# In a session of its own, but on a terminal: that has only one.
[ "$mode" = terminal ] || set -- "$@" "$found"
take && count=$value
take && program=$value
set -- "$@" "$program"
while [ "$count" -gt 1 ]; do
    take
    set -- "$@" "$value"
    count=$((count - 1))
done
refusals

if [ "$mode" = terminal ]; then
    # What the terminal says to all is for the command; this shell stays to tell how it ended.
    trap : HUP INT QUIT TERM USR1 USR2 ALRM
    trap '' TSTP TTIN TTOU
    exec 8>&2 2>/dev/null # no "Killed" of its own
    (
        trap - HUP INT QUIT TERM USR1 USR2 ALRM TSTP TTIN TTOU
        exec 2>&8 8>&-
        become "$@"
    )
    code=$?
    stty sane
    account "$code"
    exit "$code"
fi

# run VARIABLE... -- WORD...: the shell that waits for the command.
run() {
    exec 8>&2 2>/dev/null
    (
        exec 2>&8 7>&- 8>&-
        become "$@"
    )
    account "$?"
    # What is not read yet may be input that the command did not want.
    [ -z "$stay" ] || while read -r _; do :; done
}

code=$({ { run "$@" 2>&1 >&6 6>&- | cat >&4 6>&-; } 6>&1 | cat >&3; } 7>&1)
exit "$code"

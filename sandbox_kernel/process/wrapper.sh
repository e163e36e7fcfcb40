#!/bin/sh
# wrapper.sh TEXT [inner] - runs one command and accounts for it (design contract W1-W24).
#
# Run as `sh -c TEXT wrapper TEXT` by the code uid. Nothing about the command stands in this
# argv, because the engine shows an exec's argv to everybody who watches its events. stdin brings,
# each as a count of lines and then the lines: nonce, working directory, number of variables,
# each NAME=VALUE, number of words, each word of the command. The report "ready" is answered by
# the line "go" or by the end of input; what follows "go" is the command's own stdin.
#
# Reports are lines on stderr: \036 NONCE SPACE words. The nonce is in no argv, environment or
# file. Each is one write below PIPE_BUF, so that none is ever torn.
#   failed WORDS            nothing runs; exit code 126 (127 for a command that is not there)
#   ready ROOT START PID    ROOT: the process above everything, with its start time; PID: the command
#   holds PIPE PIPE         what the command's stdout and stderr are connected to
#   exit CODE               the command's own process has ended
#   end                     the last process that could write output has closed it
#
# Processes: ROOT is the engine's init as child subreaper where the image has it, and this shell
# otherwise. Between the command and the engine stand two `cat`s, which end when the last holder
# of their pipe closes it: nothing polls. The command is in a session of its own, everything of
# the wrapper is in the exec's; no process can enter a session that exists, so that a stop can
# tell the two apart without a list of pids.
#
# What it does not do: write any file, trust one, signal anything, or survive a SIGKILL by its own
# command, which the host then reports as an unknown outcome.
# shellcheck disable=SC2015 # A && B || C is meant as it reads
set -u
if [ "${2-}" != inner ]; then
    for init in /sbin/docker-init /run/podman-init /dev/init; do
        if [ -x "$init" ]; then
            exec "$init" -s -- sh -c "$1" wrapper "$1" inner
        fi
    done
    root=$$
else
    root=$PPID
fi

newline='
'
nonce=''
report() { printf '\036%s %s\n' "$nonce" "$*" >&4; }
give_up() {
    report "failed $1"
    exit "${2:-126}"
}
# take: the next value into $value.
take() {
    IFS= read -r lines || exit 126
    value=''
    while [ "$lines" -gt 0 ]; do
        IFS= read -r line || exit 126
        value=$value$line
        lines=$((lines - 1))
        [ "$lines" -eq 0 ] || value=$value$newline
    done
}
# own_stat: the start time of process $1 into $started; its name may hold anything.
own_stat() {
    whole=''
    while IFS= read -r line; do whole="$whole $line"; done <"/proc/$1/stat"
    # shellcheck disable=SC2086 # into fields
    set -- ${whole##*) }
    shift 19
    started=$1
}

exec 3>&1 4>&2
take && nonce=$value
take && directory=$value
take && variables=$value
[ -r /proc/self/stat ] || give_up "missing /proc"
for program in setsid cat ls readlink; do
    command -v "$program" >/dev/null 2>&1 || {
        echo "sandbox-kernel: the image lacks the program $program" >&2
        give_up "missing $program"
    }
done
# Without a process of its own; the command's PATH may not lead there.
IFS=:
for folder in $PATH; do
    setsid=$folder/setsid
    [ ! -x "$setsid" ] || break
done
unset IFS

# In the command's own process, up to its exec.
become() {
    read -r self _ </proc/self/stat
    own_stat "$root"
    links=$(exec ls -l "/proc/$self/fd/1" "/proc/$self/fd/2") || give_up "no pipe"
    out=${links%%"$newline"*} out=${out##* } err=${links##* }
    while [ "$variables" -gt 0 ]; do
        take
        # shellcheck disable=SC2163 # NAME=VALUE
        export "$value" || give_up "environment"
        variables=$((variables - 1))
    done
    take
    words=$value
    set --
    while [ "$words" -gt 0 ]; do
        take
        set -- "$@" "$value"
        words=$((words - 1))
    done
    cd "$directory" 2>/dev/null || give_up "directory"
    case $1 in
    */*) [ -e "$1" ] || give_up "not-found" 127 ;;
    *) command -v "$1" >/dev/null 2>&1 || give_up "not-found" 127 ;;
    esac
    report "holds $out $err"
    report "ready $root $started $self"
    read -r answer && [ "$answer" = go ] || exit 126
    unset nonce
    exec "$setsid" "$@" 3>&- 4>&-
}

# The shell that waits for the command: its own messages ("Killed") go nowhere.
run() {
    exec 8>&2 2>/dev/null
    (
        exec 2>&8 7>&- 8>&-
        become
    )
    code=$?
    report "exit $code"
    echo "$code" >&7
}

code=$({ { run 2>&1 >&6 6>&- | cat >&4 6>&-; } 6>&1 | cat >&3; } 7>&1)
report end
exit "$code"

#!/bin/sh
# lease.sh TTL MAX [TEXT] - the main process of a sandbox: it lives only while somebody renews it.
#
# Run as `sh -c TEXT lease TTL MAX TEXT` by the control uid, with a stream attached to stdin.
#   TTL   seconds of silence after which the lease ends (an integer, at least 2)
#   MAX   seconds after which it ends in any case; 0 means never
#   TEXT  this file again, so that a shell without a timed `read` can hand over to bash
#
# A renewal is one line on stdin. Each is answered by the line "lease" on stdout, and so is the
# start, so that the owner can tell a live lease from a dead connection.
#
# Ends with   0  end of input: the owner let go, or died
#             3  silence: no line for TTL seconds, and at most an eighth of TTL (1 s) later
#             4  the lifetime MAX is over
#             5  the clock broke: it needs a process, and the process limit left it none
# and the engine then removes the container with everything in it.
#
# What it needs: sh (dash, busybox ash, bash), sleep, kill. No process is started after the start,
# so a fork bomb cannot stop the clock; the exception is dash in an image without bash, whose
# `read` knows no timeout: there a helper ticks, and where it cannot, the lease ends with 5 rather
# than going on without a clock. A paused container does not tick: silence is counted in steps,
# never as a difference of times. The code's uid can neither write to this stdin nor signal these
# processes.
#
# What it does not do: clean up (the engine does), log, or trust anything that is in a file.
set -u
ttl=$1 max=$2
step=$((ttl / 8))
[ "$step" -ge 1 ] || step=1
# One step more than fits into TTL: a renewal may come in the middle of the first.
allowed=$(((ttl + step - 1) / step + 1))
silent=0

# Told apart by its status: 1 is the end of /dev/null, 2 an option that this shell does not know.
# shellcheck disable=SC3045 # whether `read -t` exists is the question
read -r -t 1 _ </dev/null 2>/dev/null
timed=$?
if [ "$timed" -gt 1 ] && command -v bash >/dev/null 2>&1; then
    exec bash -p -c "$3" lease "$ttl" "$max" "$3"
fi

trap 'exit 4' USR2
trap 'exit 5' HUP
if [ "$max" -gt 0 ]; then
    (
        trap - USR2 HUP
        sleep "$max"
        kill -USR2 "$$" 2>/dev/null
    ) &
fi

if [ "$timed" -le 1 ]; then
    echo lease
    while :; do
        # A failure is the end of input or a timeout, and ash gives both the same status. At the
        # end of input a second look says "readable" and then reads nothing.
        # shellcheck disable=SC3045 # it does exist, as was just found
        if read -r -t "$step" _; then
            silent=0
            echo lease
        elif read -r -t 0 _; then
            read -r _ || exit 0
            silent=0
            echo lease
        else
            silent=$((silent + 1))
            [ "$silent" -lt "$allowed" ] || exit 3
        fi
    done
fi

tick() {
    silent=$((silent + 1))
    [ "$silent" -lt "$allowed" ] || exit 3
    ticked=1
}
trap tick USR1
(
    # A fork that fails ends this shell: that too must be heard.
    trap 'kill -HUP "$$" 2>/dev/null' EXIT
    trap - USR1 USR2 HUP
    while sleep "$step" && kill -USR1 "$$" 2>/dev/null; do :; done
) &
echo lease
while :; do
    ticked=0
    if read -r _; then
        silent=0
        echo lease
    elif [ "$ticked" -eq 0 ]; then
        # Not cut short by a tick, so the input has ended. When both came at once, the next turn
        # sees the end again.
        exit 0
    fi
done

#!/bin/sh
# sweep.sh - ends every process of the user that runs it, itself excepted (contract W11).
#
# Run as `sh -c TEXT sweep` by the code uid. One system call reaches all of them at once, those
# of a fork bomb and those being started included. It needs no other process. Says "swept" when
# none is left, else "left" and their pids.
# shellcheck disable=SC2086 # a list of pids
set -u
user=''
while read -r word first _; do [ "$word" != Uid: ] || user=$first; done </proc/self/status
read -r me _ </proc/self/stat
rounds=500
while [ "$rounds" -gt 0 ]; do
    kill -9 -1 2>/dev/null
    left=''
    for directory in /proc/[0-9]*; do
        id=${directory#/proc/} state='' uid='' threads=0
        [ "$id" != "$me" ] || continue
        {
            while read -r word first _; do
                case $word in
                State:) state=$first ;;
                Uid:) uid=$first ;;
                Threads:) threads=$first ;;
                esac
            done <"$directory/status"
        } 2>/dev/null
        [ "$uid" = "$user" ] || continue
        # A process whose first thread has ended looks dead while its other threads go on.
        case $state:$threads in [ZX]:[01]) continue ;; esac
        left="$left $id"
    done
    [ -n "$left" ] || {
        echo swept
        exit 0
    }
    rounds=$((rounds - 1))
done
echo "left$left"

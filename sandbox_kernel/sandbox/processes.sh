#!/bin/sh
# processes.sh UID - print the pid of every live process of a uid, one a line.
#
# Run as `sh -c TEXT processes UID` by the control uid. It needs sh and /proc, starts no process,
# and reads nothing that the uid could have written. A zombie is not alive.
set -u
for status in /proc/[0-9]*/status; do
    state='' uid=''
    while read -r key value _; do
        case $key in
            State:) state=$value ;;
            Uid:)
                uid=$value
                break
                ;;
        esac
    done 2>/dev/null <"$status"
    case $uid:$state in
        "$1":[!ZX])
            pid=${status#/proc/}
            echo "${pid%/status}"
            ;;
    esac
done

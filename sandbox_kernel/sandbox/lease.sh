#!/bin/sh
# lease.sh TTL MAX IDLE GRACE PLACE METERS [TEXT] - the main process of a sandbox: it lives only while
# somebody holds it.
#
# Run as `sh -c TEXT lease TTL MAX IDLE GRACE PLACE METERS TEXT` by the control uid, with one or more
# streams attached to stdin. Times are whole seconds.
#   TTL    silence after which a holder counts as dead (at least 2)
#   MAX    it ends so long after its start in any case; 0 means never
#   IDLE   it ends after so long without use; 0 means never
#   GRACE  it outlives its last holder so long
#   PLACE  a folder whose owner and mode are told at the start, as "workspace MODE UID"
#   METERS files of which the first that can be read tells the sandbox's use of the processor
#   TEXT   this file again, so that a shell without a timed `read` can hand over to bash
#
# A line on stdin is VERB ID, the ID being hexadecimal and of the holder's own choice:
#   join   become a holder beside others       take   become the only one; the others are lost,
#   keep   go on being one                            and nobody may join while this one lives
#   touch  the same, and it is in use          left   be none; with the last one it ends
#   ready  its workspace has been prepared     park   be none; it lives on for GRACE
# Each is answered by "lease VERB ID FIRST COUNT READY IDLE_LEFT LIFE_LEFT" on stdout, which
# every attached stream gets, and so is the start, with - for the ID. FIRST is the oldest holder;
# a time that has no end is told as -. For VERB an answer says "lost" to who is no holder (any
# more), "held" to who may not join and "full" when there are too many.
#
# Ends with   0  end of input, or the last holder left
#             3  silence: no holder for GRACE (at the start: none came within TTL)
#             4  the lifetime MAX is over
#             5  the clock broke: no /proc, or it needs a process and none can start
#             6  nobody used it for IDLE
# and the engine then removes the container with everything in it. 0 and 4 are exact; 3 and 6 come
# at most an eighth of the shortest of TTL, IDLE and GRACE (1 s) late, so does 4 in dash.
#
# What it needs: sh (dash, busybox ash, bash), ls, sleep, kill. No process is started after the
# start, so a fork bomb cannot stop the clock; the exception is dash in an image without bash,
# whose `read` knows no timeout: there a helper ticks, and where it cannot, the lease ends with 5
# rather than going on without a clock. A paused container does not tick: of the time for which it
# was paused half a TTL counts, and all of it for MAX. In use is a sandbox that was touched, or
# that used a tenth of a processor. The code's uid can neither write to this stdin nor signal
# these processes; it can keep IDLE from coming, by using the processor.
#
# What it does not do: clean up (the engine does), log, or trust anything that is in a file of the
# code's.
set -uf
ttl=$1 max=$2 idle=$3 grace=$4 place=$5 meters=$6
step=$((ttl / 8))
for limit in "$idle" "$grace" "$max"; do
    if [ "$limit" -gt 0 ] && [ $((limit / 8)) -lt "$step" ]; then step=$((limit / 8)); fi
done
[ "$step" -ge 1 ] || step=1

# Told apart by its status: 1 is the end of /dev/null, 2 an option that this shell does not know.
# shellcheck disable=SC3045 # whether `read -t` exists is the question
read -r -t 1 _ </dev/null 2>/dev/null
timed=$?
if [ "$timed" -gt 1 ] && command -v bash >/dev/null 2>&1; then
    exec bash -p -c "$7" lease "$@"
fi

# The clock counts hundredths of seconds; without the zeros that would make the number octal.
look_at_clock() {
    read -r up _ </proc/uptime || exit 5
    up=${up%.*}${up#*.}
    while :; do
        case $up in 0?*) up=${up#0} ;; *) break ;; esac
    done
}

# What the whole sandbox has used of the processors, in microseconds.
meter='' used=0
look_at_meter() {
    if [ -n "$meter" ] && read -r word number _ <"$meter"; then
        case $word in usage_usec) used=$number ;; *) used=$((word / 1000)) ;; esac
    fi
}

# A turn of the loop takes no longer than a step, and a little more on a busy machine. Of one that
# did, so much counts: too little for a holder who renews to be taken for dead.
most=$((ttl * 50 + 10))

# A word of `holders` is ID=AGE, the oldest holder first.
holders='' sole='' ready=0 quiet=0 alone=0 patience=$ttl

elapse() {
    look_at_clock
    passed=$((up - last)) last=$up
    [ "$passed" -le "$most" ] || passed=$most
    quiet=$((quiet + passed)) alone=$((alone + passed)) aged=''
    for holder in $holders; do
        aged="$aged ${holder%=*}=$((${holder#*=} + passed))"
    done
    holders=$aged
}

judge() {
    if [ "$max" -gt 0 ] && [ $((up - born)) -ge $((max * 100)) ]; then exit 4; fi
    alive=''
    for holder in $holders; do
        [ "${holder#*=}" -gt $((ttl * 100)) ] || alive="$alive $holder"
    done
    if [ -n "$holders" ] && [ -z "$alive" ]; then sole='' alone=0; fi
    holders=$alive
    if [ -z "$alive" ] && [ "$alone" -ge $((patience * 100)) ]; then exit 3; fi
    [ "$idle" -gt 0 ] || return 0
    if [ $((up - metered)) -ge 100 ]; then
        look_at_meter
        [ $((used - before)) -lt $(((up - metered) * 1000)) ] || quiet=0
        before=$used metered=$up
    fi
    [ "$quiet" -lt $((idle * 100)) ] || exit 6
}

tell() {
    verb=$1 id=$2 idle_left=- life_left=-
    [ "$idle" -eq 0 ] || idle_left=$((idle - quiet / 100))
    [ "$max" -eq 0 ] || life_left=$((max - (up - born) / 100))
    # shellcheck disable=SC2086 # words are what is wanted
    set -- $holders
    first=${1:--}
    echo "lease $verb $id ${first%=*} $# $ready $idle_left $life_left"
}

hear() {
    verb=$1 id=$2 known='' others='' all=''
    # A line of which a timeout has taken the beginning is none.
    case $verb in join | take | keep | touch | ready | left | park) ;; *) return 0 ;; esac
    case $id in '' | *[!0-9a-f]*) return 0 ;; esac
    for holder in $holders; do
        if [ "${holder%=*}" = "$id" ]; then
            known=yes all="$all $id=0"
        else
            others="$others $holder" all="$all $holder"
        fi
    done
    case $verb:$known in
        take:*) all=" $id=0" sole=$id ;;
        join:)
            # shellcheck disable=SC2086 # words are what is wanted
            set -- $holders
            if [ -n "$sole" ]; then
                tell held "$id"
                return 0
            elif [ $# -ge 64 ]; then
                tell full "$id"
                return 0
            fi
            all="$all $id=0"
            ;;
        left:yes | park:yes)
            all=$others
            [ "$sole" != "$id" ] || sole=''
            ;;
        join:yes | keep:yes | touch:yes | ready:yes) ;;
        *)
            tell lost "$id"
            return 0
            ;;
    esac
    case $verb in
        ready) ready=1 quiet=0 ;;
        join | take | touch) quiet=0 ;;
    esac
    holders=$all patience=$grace
    tell "$verb" "$id"
    if [ -z "$holders" ]; then
        alone=0
        if [ "$verb" = left ] || [ "$grace" -eq 0 ]; then exit 0; fi
    fi
}

told() {
    echo "workspace ${1:--} ${3:--}"
}
# shellcheck disable=SC2046 # words are what is wanted
told $(ls -ldn "$place" 2>/dev/null)
look_at_clock
born=$up last=$up metered=$up before=0
if [ "$idle" -gt 0 ]; then
    for meter in $meters ''; do
        [ ! -r "$meter" ] || break
    done
    look_at_meter
    before=$used
fi

if [ "$timed" -le 1 ]; then
    tell start -
    while :; do
        wait=$step
        if [ "$max" -gt 0 ]; then
            left=$((max - (up - born) / 100))
            [ "$left" -ge "$wait" ] || wait=$left
            [ "$wait" -ge 1 ] || wait=1
        fi
        heard=''
        # A failure is the end of input or a timeout, and ash gives both the same status. At the
        # end of input a second look says "readable" and then reads nothing.
        # shellcheck disable=SC3045 # it does exist, as was just found
        if read -r -t "$wait" heard who _; then
            :
        elif read -r -t 0 _; then
            read -r heard who _ || exit 0
        else
            heard=''
        fi
        elapse
        [ -z "$heard" ] || hear "$heard" "$who"
        judge
    done
fi

trap 'ticked=1' USR1
trap 'exit 5' HUP
(
    # A fork that fails ends this shell: that too must be heard.
    trap 'kill -HUP "$$" 2>/dev/null' EXIT
    trap - USR1 HUP
    while sleep "$step" && kill -USR1 "$$" 2>/dev/null; do :; done
) &
tell start -
while :; do
    ticked=0
    if read -r heard who _; then
        elapse
        hear "$heard" "$who"
    elif [ "$ticked" -eq 0 ]; then
        # Not cut short by a tick, so the input has ended. When both came at once, the next turn
        # sees the end again.
        exit 0
    else
        elapse
    fi
    judge
done

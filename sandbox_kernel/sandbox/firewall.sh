#!/bin/sh
# What sandboxes may reach from an engine's machine, for iptables. Run it there as root:
#
#   sh FILE apply     put the rules in force; run it again after the engine was installed anew
#   sh FILE remove    take them away
#
# It reads RESOLVERS, CONTROLS and DENIED, lists of addresses, from the lines before it. The rules
# stand in chains of their own, reached from DOCKER-USER and INPUT: a flush of those (a reload of
# firewalld or ufw) takes the rules out of force. The nftables form has no such weakness; take it
# where you can. Each chain is replaced as a whole, and the jumps come last.
#
# It cannot see what a bridge passes between its own ports unless the machine has
# net.bridge.bridge-nf-call-iptables=1. `jupyter sandbox firewall check` proves the whole.
set -eu

EGRESS=sbx-egress
INTERNAL=sbx-internal
REJECT='-j REJECT --reject-with icmp-admin-prohibited'
LIMIT='-m hashlimit --hashlimit-name sbx-dns --hashlimit-mode srcip --hashlimit-above 20/second --hashlimit-burst 100'

# questions CHAIN: what a sandbox may ask in a second bounds what it can smuggle out in questions;
# first of all, since after one answer the next questions are an established connection.
questions() {
  for address in $RESOLVERS; do
    for protocol in tcp udp; do
      echo "-A $1 -d $address -p $protocol --dport 53 $LIMIT -j DROP"
    done
  done
}

rules() {
  echo '*filter'
  echo ':SBX-OUTWARDS - [0:0]'
  echo ':SBX-INWARDS - [0:0]'
  echo ':SBX-HERE - [0:0]'

  # From a sandbox with a way out, to anything that is not this machine. RETURN, and not ACCEPT:
  # the engine's own rules decide next.
  echo '-A SBX-OUTWARDS -m conntrack --ctstate INVALID -j DROP'
  questions SBX-OUTWARDS
  echo '-A SBX-OUTWARDS -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN'
  echo "-A SBX-OUTWARDS -o $EGRESS -j DROP"
  echo "-A SBX-OUTWARDS -o $INTERNAL -j DROP"
  # Before the private ranges, since the one resolver usually is in one of them.
  for address in $RESOLVERS; do
    echo "-A SBX-OUTWARDS -d $address -p udp --dport 53 -j RETURN"
    echo "-A SBX-OUTWARDS -d $address -p tcp --dport 53 -j RETURN"
  done
  # A port that this machine publishes for another container: rewritten before it gets here.
  echo "-A SBX-OUTWARDS -m conntrack --ctstate DNAT $REJECT"
  for address in $CONTROLS; do echo "-A SBX-OUTWARDS -d $address $REJECT"; done
  for protocol in tcp udp; do
    echo "-A SBX-OUTWARDS -p $protocol -m multiport --dports 53,853 $REJECT"
  done
  for range in $DENIED; do echo "-A SBX-OUTWARDS -d $range $REJECT"; done
  echo "-A SBX-OUTWARDS -p tcp -m multiport --dports 25,465,587 $REJECT"
  echo "-A SBX-OUTWARDS -p tcp --syn -m connlimit --connlimit-above 256 --connlimit-mask 32 $REJECT"
  echo '-A SBX-OUTWARDS -m conntrack --ctstate NEW -m hashlimit --hashlimit-name sbx-new --hashlimit-mode srcip --hashlimit-above 100/second --hashlimit-burst 500 -j DROP'
  echo '-A SBX-OUTWARDS -p tcp -j RETURN'
  echo '-A SBX-OUTWARDS -p udp --dport 443 -j RETURN'
  echo "-A SBX-OUTWARDS $REJECT"

  # To a sandbox: nothing but answers.
  echo '-A SBX-INWARDS -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN'
  echo '-A SBX-INWARDS -j DROP'

  # From a sandbox to this machine itself: nothing but answers, and its resolver if it is here.
  questions SBX-HERE
  echo '-A SBX-HERE -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN'
  echo "-A SBX-HERE -i $INTERNAL -j DROP"
  for address in $RESOLVERS; do
    echo "-A SBX-HERE -d $address -p udp --dport 53 -j RETURN"
    echo "-A SBX-HERE -d $address -p tcp --dport 53 -j RETURN"
  done
  echo '-A SBX-HERE -j DROP'
  echo 'COMMIT'
}

# Each line is a rule: first the program, then the chain, then the rest.
jumps() {
  for bridge in "$EGRESS" "$INTERNAL"; do
    echo "iptables DOCKER-USER -o $bridge -j SBX-INWARDS"
    echo "iptables INPUT -i $bridge -j SBX-HERE"
    echo "ip6tables INPUT -i $bridge -j DROP"
    echo "ip6tables FORWARD -i $bridge -j DROP"
  done
  echo "iptables DOCKER-USER -i $EGRESS -j SBX-OUTWARDS"
  echo "iptables DOCKER-USER -i $INTERNAL -j DROP"
}

# occurrences PROGRAM CHAIN RULE: the numbers of a rule in its chain, one a line.
occurrences() {
  # The first line is the chain's own.
  "$1" -w 5 -S "$2" | grep -n -F -x -e "-A $2 $3" | cut -d: -f1 |
    while read -r line; do echo $((line - 1)); done
}

# leave N PROGRAM CHAIN RULE: take the rule's last occurrences away until N are left.
leave() {
  while [ "$(occurrences "$2" "$3" "$4" | wc -l)" -gt "$1" ]; do
    "$2" -w 5 -D "$3" "$(occurrences "$2" "$3" "$4" | tail -n 1)"
  done
}

case ${1:-} in
  apply)
    rules | iptables-restore -w 5 --noflush
    jumps | while read -r program chain rule; do
      # First in its chain, so that nothing before it lets a packet through; what an earlier run
      # put there stands behind by now, and goes.
      # shellcheck disable=SC2086 # a rule is several words
      "$program" -w 5 -I "$chain" 1 $rule
      leave 1 "$program" "$chain" "$rule"
    done
    ;;
  remove)
    jumps | while read -r program chain rule; do leave 0 "$program" "$chain" "$rule"; done
    for chain in SBX-OUTWARDS SBX-INWARDS SBX-HERE; do
      iptables -w 5 -F "$chain" 2>/dev/null || continue
      iptables -w 5 -X "$chain"
    done
    ;;
  *)
    sed -n '/^# What/,/^[^#]/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

# shellcheck shell=bash
# Completion of jupyter sandbox; printed by: jupyter sandbox completion bash (or zsh)

# What can follow a command: its own commands and options, and the kinds of its arguments.
_jupyter_sandbox_follow() {
    words='' kinds=''
    case $1 in
# COMMANDS
    esac
}

_jupyter_sandbox_ask() {
    if [ "${COMP_WORDS[0]##*/}" = jupyter ]; then
        "${COMP_WORDS[0]}" sandbox "$@" 2>/dev/null
    else
        "${COMP_WORDS[0]}" "$@" 2>/dev/null
    fi
}

# Offer the lines of the standard input that begin with $1; a space in one is quoted.
_jupyter_sandbox_offer() {
    local line
    while IFS= read -r line; do
        case $line in
        "$1"*) COMPREPLY+=("$(printf '%q' "$line")") ;;
        esac
    done
}

_jupyter_sandbox() {
    local current=${COMP_WORDS[COMP_CWORD]} index=1 command='' words kinds kind
    COMPREPLY=()
    [ "${COMP_WORDS[0]##*/}" = jupyter ] && index=2
    _jupyter_sandbox_follow ''
    while [ "$index" -lt "$COMP_CWORD" ]; do
        case " $words " in
        *" ${COMP_WORDS[index]} "*)
            case ${COMP_WORDS[index]} in
            -*) ;;
            *)
                command="${command:+$command }${COMP_WORDS[index]}"
                _jupyter_sandbox_follow "$command"
                ;;
            esac
            ;;
        esac
        index=$((index + 1))
    done
    case $current in
    -*) ;;
    *)
        for kind in $(printf '%s' "$kinds"); do
            case $kind in
            sandboxes)
                _jupyter_sandbox_offer "$current" <<EOF
$(_jupyter_sandbox_ask ls | awk 'NR > 1 { print $1; print $2 }')
EOF
                ;;
            places)
                _jupyter_sandbox_offer "$current" <<EOF
$(_jupyter_sandbox_ask ls | awk 'NR > 1 { print $1 ":"; print $2 ":" }')
$(compgen -f -- "$current")
EOF
                ;;
            keys)
                _jupyter_sandbox_offer "$current" <<EOF
$(_jupyter_sandbox_ask workspaces ls -q)
EOF
                ;;
            files)
                _jupyter_sandbox_offer "$current" <<EOF
$(compgen -f -- "$current")
EOF
                ;;
            shells) words="$words bash zsh" ;;
            esac
        done
        ;;
    esac
    _jupyter_sandbox_offer "$current" <<EOF
$(printf '%s' "$words" | tr ' ' '\n')
EOF
}

# Whoever completed jupyter before goes on with its other commands.
_jupyter_sandbox_before=$(complete -p jupyter 2>/dev/null |
    sed -n 's/.*-F \([^ ]*\).*/\1/p')
[ "$_jupyter_sandbox_before" = _jupyter_or_sandbox ] && _jupyter_sandbox_before=''

_jupyter_or_sandbox() {
    if [ "$COMP_CWORD" -gt 1 ] && [ "${COMP_WORDS[1]}" = sandbox ]; then
        _jupyter_sandbox
    elif [ -n "$_jupyter_sandbox_before" ]; then
        "$_jupyter_sandbox_before" "$@"
    else
        COMPREPLY=()
        [ "$COMP_CWORD" -gt 1 ] || _jupyter_sandbox_offer "${COMP_WORDS[COMP_CWORD]}" <<EOF
sandbox
EOF
    fi
}

complete -o default -F _jupyter_or_sandbox jupyter
complete -F _jupyter_sandbox jupyter-sandbox

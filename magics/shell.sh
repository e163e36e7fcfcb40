#!/bin/sh
# shell.sh SCRIPT - runs the text of a cell, strictly: with bash where the image has it, else sh.
#
# A cell ends at its first command that fails, at a variable that is not set, and, where the shell
# can do that, at a pipe of which a part fails. Standard input is the cell's.
command -v bash >/dev/null 2>&1 && exec bash -euo pipefail -c "$1"
# shellcheck disable=SC3040 # this asks whether the shell has it
(set -o pipefail) 2>/dev/null && exec sh -euo pipefail -c "$1"
exec sh -eu -c "$1"

#!/bin/sh
# workspace.sh VERB PLACE [ARG] - what is done to a workspace that no sandbox uses.
#
# Run as `sh -c TEXT workspace VERB PLACE [ARG]` by the code's uid, never by root, in a sandbox of
# its own: whatever lies in the workspace can do here what it can do in any sandbox.
#   size PLACE            print the KiB that it takes and the number of entries in it
#   occupied PLACE        end with 0 if there is anything in it, else with 1
#   export PLACE NONCE    write it as a tar archive, then NONCE, a blank, tar's exit code in three
#                         digits and a newline; end when a line or the end comes on stdin
#   import PLACE          unpack a tar archive from stdin into it
#   copy PLACE FROM       copy everything in the folder FROM into it
#   clear PLACE           remove everything in it
#   begin PLACE HOW       end with 0 and note it if it is to be filled: HOW is "new", or there is
#                         nothing in it, or its filling was begun before; else end with 1
#   filled PLACE          take that note away
#
# The trailer of `export` is there because an engine may drop the last of the output when a
# process ends while its output is not being read: the reader first takes all of it.
set -u
verb=$1 place=$2
note=.sbx-new
cd "$place" || exit 9
case $verb in
    size)
        entries=$(find . -mindepth 1 -print0 | tr -dc '\0' | wc -c)
        kibibytes=$(du -sk . | cut -f 1)
        echo "$kibibytes $((entries))"
        ;;
    occupied)
        [ -n "$(find . -mindepth 1 -maxdepth 1 | head -c 1)" ]
        ;;
    export)
        tar -cf - .
        printf '%s %03d\n' "$3" "$?"
        read -r _
        ;;
    import)
        # Not `-p`: what cannot be had here (owners, set-id bits, devices) is not asked for.
        tar -xf - -o
        code=$?
        # The archive may say otherwise of the folder itself.
        chmod u+rwx .
        exit "$code"
        ;;
    copy)
        exec cp -a "$3/." .
        ;;
    clear)
        find . -mindepth 1 -maxdepth 1 -exec rm -rf {} +
        ;;
    begin)
        # What an upload that was killed has left is nothing either.
        found=$(find . -mindepth 1 -maxdepth 1 ! -name '.sbx-part-*' | head -c 1)
        if [ "$3" = new ] || [ -z "$found" ] || [ -f "$note" ]; then
            : >"$note" || exit 9
            exit 0
        fi
        exit 1
        ;;
    filled)
        rm -f "$note"
        ;;
    *)
        exit 9
        ;;
esac

"""Stand-ins for launchctl and systemctl: shell scripts that note what they are asked, and start nothing."""

from pathlib import Path

# Each knows what is loaded by a file of that name, and fails as asked by a file `refuses`.
LAUNCHCTL = """#!/bin/sh
echo "launchctl $*" >> "$HOME/asked"
for last; do :; done
name=$(basename "$last" .plist)
[ -e "$HOME/refuses" ] && [ "$1" = bootstrap ] && { echo "Bootstrap failed: 5: Input/output error" >&2; exit 5; }
case $1 in
    bootstrap) [ ! -e "$HOME/$name" ] && [ -e "$last" ] && touch "$HOME/$name" ;;
    bootout) mv "$HOME/$name" "$HOME/leaving" ;;
    print)
        [ -e "$HOME/leaving" ] && { rm "$HOME/leaving"; exit 0; }
        [ -e "$HOME/$name" ] || { echo "Could not find service" >&2; exit 113; }
        printf '%s = {\\n\\tstate = running\\n\\tpid = 41\\n\\tlast exit code = 0\\n\\t\\tstate = inner\\n}\\n' "$name" ;;
esac
"""
SYSTEMCTL = """#!/bin/sh
echo "systemctl $*" >> "$HOME/asked"
[ -e "$HOME/refuses" ] && { echo "Failed to connect to bus: No medium found" >&2; exit 1; }
for last; do :; done
case "$2" in
    restart|start) touch "$HOME/$last" ;;
    stop) rm -f "$HOME/$last" ;;
    disable) rm -f "$HOME/$last" ;;
    show) if [ -e "$HOME/$3" ]; then echo ActiveState=active; echo SubState=running; echo MainPID=42; echo Result=success
          else echo ActiveState=failed; echo SubState=failed; echo MainPID=0; echo Result=exit-code; fi ;;
esac
"""


def put(folder: Path) -> None:
    """Put both into *folder*, for the PATH of a test."""
    for name, text in (("launchctl", LAUNCHCTL), ("systemctl", SYSTEMCTL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

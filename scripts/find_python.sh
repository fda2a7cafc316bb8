#!/bin/sh
# Print the first Python >= 3.10 that can make virtual environments; say what is missing otherwise.
found=""
for candidate in "$@" python3 python3.13 python3.12 python3.11 python3.10 python3.14 python; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 || continue
    found="$candidate"
    if "$candidate" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        echo "$candidate"
        exit 0
    fi
done
if [ -n "$found" ]; then
    echo "error: $found cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2
else
    echo "error: Python 3.10 or newer is needed and was not found; name one with: make PYTHON=/path/to/python3" >&2
fi
exit 1

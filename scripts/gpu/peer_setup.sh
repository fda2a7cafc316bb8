#!/usr/bin/env bash
# Unpack another engine that was packed as parts (site-packages as tar.xz, cut by split -d into p_00, p_01 …), for compare.py's --peer-site.
#   usage: peer_setup.sh PARTSDIR SITEDIR
# Parts too large to arrive together come in several goes: put each into PARTSDIR as it arrives, and run this with the last. It does
# nothing where SITEDIR is unpacked already. With a file SHA256SUMS among the parts it checks them first.
set -euo pipefail
parts=${1:?PARTSDIR} site=${2:?SITEDIR}
if [ -e "$site/.complete" ]; then echo "peer: $site is unpacked already"; exit 0; fi
found=$(find "$parts" -maxdepth 1 -name 'p_[0-9]*' | sort)
[ -n "$found" ] || { echo "peer: no parts p_00 … in $parts" >&2; exit 1; }
n=0
for part in $found; do
    [ "$(basename "$part")" = "$(printf 'p_%02d' $n)" ] || { echo "peer: part p_$(printf '%02d' $n) is missing in $parts" >&2; exit 1; }
    n=$((n + 1))
done
[ ! -e "$parts/SHA256SUMS" ] || (cd "$parts" && sha256sum --quiet -c SHA256SUMS)
rm -rf "$site" && mkdir -p "$site"
# shellcheck disable=SC2086
cat $found | xz -dc -T0 | tar xf - -C "$site"
touch "$site/.complete"
echo "peer: $n parts unpacked into $site ($(du -sh "$site" | cut -f1)):" "$(cd "$site" && ls -d vllm-*.dist-info 2>/dev/null | tr '\n' ' ')"

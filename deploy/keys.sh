#!/bin/sh
# deploy/keys.sh NAME...: keys for nodes and proxies of the Helm chart, by `pdx keygen` into ./keys.
# Prints `keys:` for values.yaml. Then, once:
#   kubectl create secret generic pdx-keys $(printf -- '--from-file=%s ' keys/*.key_secret)
set -eu
echo 'keys:'
for name; do
    [ -e "keys/$name.key" ] || pdx keygen "$name" >&2
    sed -n "s/.*public-key = /  $name: /p" "keys/$name.key"
done

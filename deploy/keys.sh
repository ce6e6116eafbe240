#!/bin/sh
# deploy/keys.sh NAME...: keys for nodes and proxies of the Helm chart, by `pdx keygen` into ./keys.
# Prints `keys:` for values.yaml. Then, and whenever there are more:
#   kubectl create secret generic pdx-keys $(printf -- '--from-file=%s ' keys/*.key_secret) --dry-run=client -o yaml |
#       kubectl apply -f -
set -eu
echo 'keys:'
for name; do
    [ -e "keys/$name.key" ] || pdx keygen "$name" >&2
    sed -n "s/.*public-key = /  $name: /p" "keys/$name.key"
done

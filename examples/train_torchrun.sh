#!/bin/bash
# Start this once on every node, with the same first four arguments everywhere:
#
#     examples/train_torchrun.sh FIRST_NODE NODES DEVICES CONFIG RANK_OF_THIS_NODE
#     examples/train_torchrun.sh node01 2 4 config.yaml 0        # on node01
#     examples/train_torchrun.sh node01 2 4 config.yaml 1        # on the other

set -euo pipefail

first=$1 nodes=$2 devices=$3 config=$4 node=$5

torchrun \
    --nnodes "$nodes" --node-rank "$node" --nproc-per-node "$devices" \
    --master-addr "$first" --master-port "${MASTER_PORT:-29500}" \
    --module lightning_amp fit --config "$config" \
    --trainer.num_nodes "$nodes" --trainer.devices "$devices"

#!/usr/bin/env bash
# Extraction of Qwen3-4B against the links of the same run, for every strategy and place of the shards; what one call
# costs the host. About three minutes on two GPUs:
#
#     benchmarks/extraction.sh [directory for the results] [ranks] [model]
#
# What is short comes first, so that it is there if a time limit ends the rest.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-.} ranks=${2:-2} model=${3:-qwen3-4b}
if [ "$model" = small ]; then hidden=80; else hidden=2560; fi
mkdir -p "$out"
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
bench() { # name of the results, options
    python "$here/weights.py" --model "$model" --ranks "$ranks" --bucket-bytes default,128MiB --repeat 7 \
        --json "$out/$1.json" "${@:2}" 2>"$out/$1.log" | tee "$out/$1.txt"
}
bench fp32-bf16 --offload policy --dtype fp32:bf16 --method full_tensors
python -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$here/host_time.py" --hidden $hidden --profile 25 \
    2>"$out/host-time.log" | tee "$out/host-time.txt"
bench bf16 --strategy fsdp2,fsdp1,fsdp1-orig --offload none,policy,param --method full_tensors,unshard,summon_full_params

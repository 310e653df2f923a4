#!/usr/bin/env bash
# All that is claimed of GPUs, measured again on this machine, one benchmark after the other:
#
#     benchmarks/on_gpus.sh DIRECTORY [ranks] [model]
#
# Fourteen minutes at the most on two GPUs. Each benchmark has a time limit and files of its own in the directory, so that one which
# fails or is cut off costs no other; the last column of summary.txt is its exit code, 124 if the limit ended it. Without
# a GPU, `benchmarks/on_gpus.sh DIRECTORY 2 small` shows on the emulated device that all of it runs: 140 s on 2 cores.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: on_gpus.sh DIRECTORY [ranks] [model]} ranks=${2:-2} model=${3:-qwen3-4b}
mkdir -p "$out"
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
device=$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "emulated")')
if [ "$model" = small ]; then hidden=80 sum_gib=0.1; else hidden=2560 sum_gib=4; fi
if [ "$device" = cuda ]; then patience=1; else patience=10; fi

measure() { # seconds, name, command
    local limit=$1 name=$2 begin=$SECONDS
    timeout $((limit * patience)) "${@:3}" >"$out/$name.txt" 2>"$out/$name.log"
    printf '%-20s %4d s   %d\n' "$name" $((SECONDS - begin)) $? | tee -a "$out/summary.txt"
}
under_torchrun() { # script, its options
    echo python -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$here/$1" "${@:2}"
}
weights="python $here/weights.py --model $model --ranks $ranks"

measure 180 extraction bash "$here/extraction.sh" "$out" "$ranks" "$model"
measure 90 loading-from-files $weights --direction in --source files --offload none,policy \
    --method load_full_tensors --repeat 5 --json "$out/loading-from-files.json"
measure 60 loading-chunks $(under_torchrun loading_from_files.py --device $device --hidden $hidden --directory /dev/shm)
measure 150 fingerprints $(under_torchrun fingerprints.py --sum-gib $sum_gib --model "$model" --out "$out/fingerprints.json")
measure 150 memory $(under_torchrun memory_stages.py --json "$out/memory.json" --shape "$model" --seconds 110)
measure 60 plan python "$here/plan_accuracy.py" "$out/memory.json"
measure 120 loading $weights --direction in --source rank0,ranks --offload none,policy --repeat 3 \
    --json "$out/loading.json"

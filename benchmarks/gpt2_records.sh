#!/usr/bin/env bash
# Makes the records behind the README's tables of GPT-2 again, on this machine's GPU, part by part.
#
#   benchmarks/gpt2_records.sh runs/records                        # all parts
#   benchmarks/gpt2_records.sh runs/records memory switches        # only these
#   NANOGPT=../nanoGPT SHARDS=shards benchmarks/gpt2_records.sh runs/records against long
#
# Arguments: a folder for the results, then the parts. Each becomes PART.json there, and is not made again. Called again
# with the same arguments, ladders and long runs continue where they were stopped; the other parts begin anew, and
# PART.partial.json has what they had reached. seconds.txt says how long each took. `against` needs a checkout of
# nanoGPT, `long` and `long-fp8` a folder made by `redline data prepare`; without them they are left out. LIMIT=500 ends
# each part after that many seconds, as Ctrl-C would. SPEED_UP=1.17 is the speed-up of the 8-bit step over the 16-bit
# one, as `ladder` found it; from it `long-fp8` computes the speed-up at equal loss. ROWS=budget: of `memory` only these.
# The time is the device's own: in one lease of 1,800 s fit fp8, batch, against, long-fp8 and ROWS=budget memory.
# Exit code: the highest of any part, where 1 can be a result (a row that is *different*, losses that differ).
#
#   ladder     redline ladder gpt2: every rung from fp32 on, to 8 bits at the end                 about 1,250 s on an H200
#   fp8        the end of that ladder alone, from the fastest 16-bit recipe on; only if it is named                  300 s
#   batch      the fastest 16-bit recipe at 256 sequences (loss in chunks), then with CUDA graphs                    200 s
#   memory     the rungs that save memory, at 64 and 256 sequences                                                   450 s
#   switches   what the compiler's own switches would bring                                                          400 s
#   overlap    what running memory-bound kernels under matmuls would bring                                            30 s
#   medium, large, xl   the fastest 16-bit recipe on the larger models                                     180, 220, 410 s
#   against    nanoGPT and transformers, in turns, each at several sizes                                             300 s
#   long       2,000 updates, three seeds, beside plain TF32                                                         400 s
#   long-fp8   the same with the 8-bit rungs, and with a tenth fewer updates                              350 s after long
set -euo pipefail

[ $# -gt 0 ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2 && exit 2; }
out=$1 && shift
here=$(dirname "$0")
python=${PYTHON:-python}
fast=${RECIPE:-$here/recipes/hopper.json} fp8=${FP8:-$here/recipes/hopper-fp8.json}
many=${MANY:-$here/recipes/hopper-256.json}
workload=${WORKLOAD:-gpt2}
fp8_rungs=fp8-head,fp8-linears,fp8-mlps
all=(ladder batch memory switches overlap medium large xl against long long-fp8)
named=("${all[@]}" fp8)
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")
for name in "${parts[@]}"; do
    [[ " ${named[*]} " = *" $name "* ]] || { echo "there is no part $name; the parts are: ${named[*]}" >&2 && exit 2; }
done
mkdir -p "$out"
stopped=""
trap 'stopped=yes' INT  # Ctrl-C reaches the command too, which keeps what it has

# part COMMAND...: keep its document as $name.json if it says that it is finished, and as $name.partial.json otherwise.
worst=0
part() {
    local started=$SECONDS code=0
    if [ -s "$out/$name.json" ]; then
        echo "$name: finished before" >&2
        return
    fi
    # In the foreground, so that Ctrl-C reaches the command too.
    ${LIMIT:+timeout --foreground --signal=TERM --kill-after=30 "$LIMIT"} "$@" >"$out/$name.draft" || code=$?
    echo "$name $((SECONDS - started)) s, exit code $code" | tee -a "$out/seconds.txt" >&2
    if grep -q '"finished": true' "$out/$name.draft"; then
        mv "$out/$name.draft" "$out/$name.json"
        rm -f "$out/$name.partial.json"
    elif [ -s "$out/$name.draft" ]; then
        mv "$out/$name.draft" "$out/$name.partial.json"
    else
        rm -f "$out/$name.draft"
    fi
    [ -z "$stopped" ] || exit 130
    [ "$code" -le "$worst" ] || worst=$code
}

# ladder WORDS...: run a ladder, or resume the one that was begun.
ladder() {
    if [ -e "$out/$name/run.json" ]; then
        part "$python" -m redline ladder --resume "$out/$name" --json
    else
        part "$python" -m redline ladder "$@" --out "$out/$name" --json
    fi
}

larger() {
    if [ "$workload" != gpt2 ]; then
        echo "$name: left out, WORKLOAD is $workload" >&2
        return
    fi
    ladder "$1" --from "$fast" --rungs none --micro-batch "$2" --steps 15 --check-steps "$3"
}

long_run() {
    if [ -z "${SHARDS:-}" ]; then
        echo "$name: left out, SHARDS names no folder of tokens" >&2
        return
    fi
    part "$python" "$here/long_run.py" "$workload" --recipe "$fast" --data "$SHARDS" --out "$out/runs" --at-once 4 \
        "$@" --json
}

for name in "${parts[@]}"; do
    case $name in
        ladder) ladder "$workload" --without fp16 --also "$fp8_rungs" --compile-ahead 4 ;;
        fp8) ladder "$workload" --from "$fast" --rungs "cuda-graphs,$fp8_rungs" --compile-ahead 5 ;;
        batch) ladder "$workload" --from "$many" --rungs cuda-graphs --keep all --micro-batch 256 \
            --steps 15 --check-steps 6 ;;
        memory) part "$python" "$here/memory_rungs.py" "$workload" --recipe "$fast" --micro-batch 64 --sizes 256 \
            ${ROWS:+--rows "$ROWS"} \
            --keep "$out/compiled" --json ;;
        overlap) part "$python" "$here/overlap.py" "$workload" --json ;;
        switches) part "$python" "$here/switches.py" "$workload" --recipe "$fast" --json ;;
        medium) larger gpt2-medium 64 6 ;;
        large) larger gpt2-large 32 6 ;;
        xl) larger gpt2-xl 32 8 ;;
        against) [ -z "${NANOGPT:-}" ] && echo "against: left out, NANOGPT names no checkout" >&2 ||
            part "$python" "$here/against.py" "$workload" --nanogpt "$NANOGPT" --recipe "$many" \
                --micro-batches 64,128 --at transformers=32,64 --at redline=128,256 \
                --at-once 6 --rounds 6 --keep "$out/$name.partial.json" --json ;;
        long) long_run ;;
        long-fp8) long_run --changed "$fp8" ${SPEED_UP:+--speed-up "$SPEED_UP"} ;;
    esac
done
exit "$worst"

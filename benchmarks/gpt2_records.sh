#!/usr/bin/env bash
# The records behind the README's tables of GPT-2, made again on this machine's GPU, part by part.
#
#   benchmarks/gpt2_records.sh runs/records                        # all parts
#   benchmarks/gpt2_records.sh runs/records memory fp8 switches    # these
#   NANOGPT=../nanoGPT SHARDS=shards benchmarks/gpt2_records.sh runs/records against long
#
# A folder for the results, then the parts. Each becomes PART.json there; what is finished stays, what was interrupted goes
# on: call it again with the same words. seconds.txt says what each took. `against` needs a checkout of nanoGPT,
# `long` a folder made by `redline data prepare`; without them they are left out. LIMIT=500 ends each part after so many
# seconds as Ctrl-C would: it keeps what it has measured.
#
#   ladder     redline ladder gpt2: every rung from fp32 on                                       about 1,000 s on an H200
#   memory     the rungs that save memory, at 64 and 256 sequences                                                   450 s
#   fp8        the 8-bit rungs on top of the fastest 16-bit recipe, with their verdicts                              300 s
#   switches   what the compiler's own switches would bring                                                          400 s
#   medium, large, xl   the fastest 16-bit recipe on the larger models                                     180, 220, 410 s
#   against    nanoGPT and transformers, in turns                                                                    250 s
#   long       2,000 updates, three seeds, beside plain TF32                                                         450 s
set -euo pipefail

out=${1:?a folder for the results} && shift
here=$(dirname "$0")
python=${PYTHON:-python}
fast=${RECIPE:-$here/recipes/hopper.json} fp8=${FP8:-$here/recipes/hopper-fp8.json}
workload=${WORKLOAD:-gpt2}
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(ladder memory fp8 switches medium large xl against long)
mkdir -p "$out"

# part COMMAND...: its document becomes $name.json when it is whole, $name.partial.json otherwise. $whole is the highest
# exit code of a whole one.
whole=0
part() {
    local started=$SECONDS code=0
    if [ -s "$out/$name.json" ]; then
        echo "$name: finished before" >&2
        return
    fi
    ${LIMIT:+timeout --signal=TERM --kill-after=30 "$LIMIT"} "$@" >"$out/$name.draft" || code=$?
    echo "$name $((SECONDS - started)) s, exit code $code" | tee -a "$out/seconds.txt" >&2
    if [ "$code" -le "$whole" ]; then
        mv "$out/$name.draft" "$out/$name.json"
    elif [ -s "$out/$name.draft" ]; then
        mv "$out/$name.draft" "$out/$name.partial.json"
    fi
}

# ladder WORDS...: or the one that was begun. A row that comes out as different is a result too (exit code 1).
ladder() {
    local whole=1
    if [ -e "$out/$name/run.json" ]; then
        part "$python" -m redline ladder --resume "$out/$name" --json
    else
        part "$python" -m redline ladder "$@" --out "$out/$name" --json
    fi
}

larger() {
    ladder "$1" --from "$fast" --rungs none --micro-batch "$2" --steps 15 --check-steps "$3"
}

for name in "${parts[@]}"; do
    case $name in
        ladder) ladder "$workload" --without fp16 --compile-ahead 4 ;;
        memory) part "$python" "$here/memory_rungs.py" "$workload" --recipe "$fast" --micro-batch 64 --sizes 256 \
            --keep "$out/compiled" --json ;;
        fp8) ladder "$workload" --from "$fast" --rungs fp8-head,fp8-linears,fp8-mlps,cuda-graphs --compile-ahead 4 ;;
        switches) part "$python" "$here/switches.py" "$workload" --recipe "$fast" --json ;;
        medium) larger gpt2-medium 64 6 ;;
        large) larger gpt2-large 32 6 ;;
        xl) larger gpt2-xl 32 8 ;;
        against) [ -z "${NANOGPT:-}" ] && echo "against: left out, NANOGPT names no checkout" >&2 ||
            part "$python" "$here/against.py" "$workload" --nanogpt "$NANOGPT" --recipe "$fast" --json ;;
        long) [ -z "${SHARDS:-}" ] && echo "long: left out, SHARDS names no folder of tokens" >&2 ||
            part "$python" "$here/long_run.py" "$workload" --recipe "$fast" --changed "$fp8" --data "$SHARDS" \
                --out "$out/long" --json ;;
        *) echo "there is no part $name; the parts are named at the top of $0" >&2 && exit 2 ;;
    esac
done

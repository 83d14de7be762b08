#!/usr/bin/env bash
# The measurements of README and WORKSPACE_NOTES.md on an H200, by name:
#
#   bash scripts/h200.sh OUT NAME [NAME...]
#
# Each leaves OUT/NAME (a run's folder) or OUT/NAME.json, and its output in
# OUT/NAME.log, whose end is printed. CUDA_VISIBLE_DEVICES chooses a card of
# several; runs on two cards at a time slow each other's hosts by a few per cent.
# KERNELS=... takes the place of --kernels of the flag files.
# SPECPILOT_DATA should stay the same between calls: it holds what was compiled.
# Seconds are those of a machine that has compiled nothing before.
set -uo pipefail

OUT="${1:?bash scripts/h200.sh OUT NAME...}"
shift
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python3}"

with() {
  "$PYTHON" -m experiments.main --output_dir="$OUT/$NAME" --flagfile="$1" \
    ${KERNELS:+--kernels="$KERNELS"} "${@:2}"
}
single() { with h200_single.flags "$@"; }
batch() { with h200_batch.flags "$@"; }

# 400 s: every W12 product beside XLA, the kernels of mixers beside floors.
kernels() {
  "$PYTHON" -m experiments.kernel_times --output="$OUT/$NAME.json" "$@"
}
# 100 s: the matrices that most bytes are in.
kernels_large() {
  kernels --shapes=16480x5120,34816x5120,248320x5120 --nodes=16,64 "$@"
}
# 90 s: those of the recurrent state for 16 requests, with several tiles.
kernels_requests() {
  kernels --products= --nodes=16,32 --prefixes=1024 --requests=16 "$@"
}
# 200 s: products in FP8 beside their floors, and nothing else.
kernels_fp8() {
  kernels --products= --nodes= \
    --fp8_rows=16,64,128,256,512 "$@"
}
# 90 s
attention() { kernels --products= --attention=triton,mosaic "$@"; }

# 690 s: W12 with a tree, one level, two and auto, beside stock, greedy.
levels() {
  single --drafter=dflash2 --systems=ar,stock --num_prompts=44 \
    --ablate=weights=w12 --ablate=tree=best_first \
    --ablate=verification=one_level,two_level,auto "$@"
}
# 880 s: the same at temperature 1; 44 prompts make a control of 8,000 tokens.
levels_t1() { levels --temperature=1 "$@"; }
# 900 s: one at a time, the chain in W12 among them.
levels_chain() {
  single --drafter=dflash2 --systems=ar,stock --num_prompts=44 \
    --ablate_design=one_at_a_time --ablate=weights=w12 \
    --ablate=tree=best_first,chain \
    --ablate=verification=one_level,two_level,auto "$@"
}
# Not timed yet as a whole: their steps by class.
levels_classes() {
  single --drafter=dflash2 --job=profile --systems=ar,stock --num_prompts=8 \
    --set=weights=w12,tree=best_first \
    "--sweep=verification=one_level|two_level|auto" "$@"
}
# 330 s
ar_w12() {
  single --drafter=none --systems=ar --ablate=weights=bf16,w12 \
    --num_prompts=44 "$@"
}
# 700 s: node budgets beside their replay.
budgets() {
  single --drafter=dflash2 --job=profile --systems=ar,stock \
    --set=weights=w12,tree=best_first \
    "--sweep=node_budget=8|16|32|48|64|96" --num_prompts=16 "$@"
}
# 370 s each: a load of 16 requests at once.
batch_c16() { batch --drafter=dflash2 --max_concurrency=16 "$@"; }
batch_fp8_c16() {
  with h200_batch_fp8.flags --drafter=dflash2 --max_concurrency=16 "$@"
}
# 300 s more: where the passes of a load spend their time.
batch_profile() { batch_c16 --job=profile --notoken_forcing "$@"; }
batch_ablation() {
  batch --drafter=dflash2 --max_concurrency=16 --set= --systems=ar,stock \
    --ablate=mechanisms=shared_budget,dynamic_draft,prompt_admission "$@"
}
# 250 s
smollm2() { with h200_smollm2.flags "$@"; }
# 1,000 s: eight A/A sessions of stock.
noise() { single --drafter=dflash2 --job=paired_test --aa_sessions=8 "$@"; }

for NAME in "$@"; do
  case "$NAME $(type -t "$NAME")" in
    with\ * | single\ * | batch\ *) ;&
    *\ | *\ builtin | *\ file | *\ keyword)
      echo "error: no measurement $NAME" >&2
      exit 2
      ;;
  esac
done
status=0
for NAME in "$@"; do
  echo "[$(date +%T)] $NAME"
  "$NAME" >"$OUT/$NAME.log" 2>&1 || { status=1; echo "$NAME: failed"; }
  tail -n 40 "$OUT/$NAME.log"
done
exit "$status"

#!/bin/sh
# Train until the run is finished, however often this is started: a pod or a job that is lost is replaced by another one.
#
#   sh train.sh FOLDER COMMAND...
#
# FOLDER/ with a slash at its end holds runs named by the date: the newest one that is not finished goes on, else one
# begins.
#
# COMMAND, as `sqlenv train --config ...`, gets --output_dir FOLDER, the words of TRAIN_FLAGS, and
# --resume_from_checkpoint true where the folder holds a checkpoint. Exit status:
#   0      the run is finished: its report is written
#   75     it was stopped in the middle, and goes on when this is started again (`sqlenv train` itself ends with 0)
#   other  what COMMAND ended with
set -eu
folder=$1
shift
case $folder in
*/)
    runs=$folder
    folder=$runs$(date -u +%Y%m%d-%H%M%S)
    for run in "$runs"20[0-9][0-9][0-9][0-9][0-9][0-9]-[0-9][0-9][0-9][0-9][0-9][0-9]; do
        if [ -f "$run/config.json" ] && [ ! -f "$run/report.html" ]; then
            folder=$run
        fi
    done
    ;;
esac
report=$folder/report.html

if [ -f "$report" ]; then
    echo "train.sh: nothing to do, $report is there"
    exit 0
fi

resume=""
for settings in "$folder"/checkpoint-*/sqlenv.json; do # the file that makes a checkpoint whole
    if [ -f "$settings" ]; then
        resume="--resume_from_checkpoint true"
    fi
done
if [ -z "$resume" ] && [ -f "$folder/config.json" ] && [ "${RANK:-0}" = 0 ]; then
    aside=$folder.lost-$(date -u +%Y%m%d-%H%M%S)
    echo "train.sh: $folder was lost before its first checkpoint, and is now $aside"
    mv "$folder" "$aside"
fi

child=""
told=""
trap 'told=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || :' TERM
# shellcheck disable=SC2086 # words, not one word
"$@" --output_dir "$folder" ${TRAIN_FLAGS:-} $resume &
child=$!
[ -z "$told" ] || kill -TERM "$child" # told between the two lines above
status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do # a signal ends `wait`, not the child
    status=0
    wait "$child" || status=$?
done
if [ "$status" = 0 ] && [ ! -f "$report" ]; then
    status=75
fi
exit "$status"

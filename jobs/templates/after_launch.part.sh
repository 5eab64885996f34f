# The signal came before the launcher started: give the launcher a second to start listening, and pass the signal on.
if [ -n "$signalled" ]; then sleep 1; pass_on; fi

# A signal ends `wait` early with a code above 128, while the launcher still runs: wait again for the launcher's code. A
# second signal that comes before the first is passed on ends it too, but calls nothing.
wait "$launcher"
code=$?
while [ "$code" -gt 128 ]; do
    wait "$launcher" 2>/dev/null
    again=$?
    # 127: the launcher had ended already, so the previous code was its own.
    if [ "$again" -eq 127 ] || { [ "$again" -eq "$code" ] && ! kill -0 "$launcher" 2>/dev/null; }; then break; fi
    code=$again
done
trap '' USR1 @{ends} # the launcher has ended; this shell must still report the result

# Reasons for a requeue. Code 75: training saved, and asks for it. An end by a signal after USR1: a rank did not listen
# yet, or did not end in time (MPICH's mpirun returns the signal's number, 9 to 15, or a mixture). A host that does not
# answer: its ranks are lost, which @{system} may take minutes to notice. All other codes are the job's result.
ask() { timeout 60 @{on_host}"$1" true >/dev/null 2>&1; }
why='' hosts=''
if [ "$code" -eq 75 ]; then
    why='saved'
elif [ -n "$announced" ] && { [ "$code" -gt 128 ] || [[ $code =~ ^(9|1[0-5])$ ]]; }; then
    why="ended by a signal after USR1 (exit code $code), resuming from the last save of hvdx.keras.Checkpoint, if any"
elif [ "$code" -ne 0 ] && [ -z "$terminated" ]; then
    hosts=$(@{all_hosts})
    # If not even this host answers, `ask` does not work here, and no host counts as lost.
    lost=$(if ask "@{this_host}"; then for host in $hosts; do { ask "$host" || echo "$host"; } & done; wait; fi)
    if [ -n "$lost" ]; then why="lost ${lost//$'\n'/, } (exit code $code)"; fi
fi

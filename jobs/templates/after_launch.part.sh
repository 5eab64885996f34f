# It came before there was a launcher; one that has only just been started would not hear it.
if [ -n "$signalled" ]; then sleep 1; pass_on; fi

# A signal ends `wait` early, with a code above 128, while the launcher still runs: wait again for its own code.
signalled=''
wait "$launcher"
code=$?
while [ -n "$signalled" ] && [ "$code" -gt 128 ]; do
    signalled=''
    wait "$launcher" 2>/dev/null
    again=$?
    # 127: there is nothing left to wait for, so the code before was the launcher's own.
    if [ "$again" -ne 127 ]; then code=$again; fi
done
trap '' USR1 @{ends} # nothing is left to signal, and this shell has yet to say how it ended

# Another turn? 75: training saved, and wants one. An end by a signal after USR1: a rank did not listen yet, or did not
# end in time (MPICH's mpirun tells the signals' numbers, 9 to 15, or a mixture). And a host that answers no more has
# lost its ranks, which @{system} may take minutes to notice. All else is the job's own.
ask() { timeout 60 @{on_host}"$1" true >/dev/null 2>&1; }
why='' hosts=''
if [ "$code" -eq 75 ]; then
    why='saved'
elif [ -n "$announced" ] && { [ "$code" -gt 128 ] || [[ $code =~ ^(9|1[0-5])$ ]]; }; then
    why="ended by a signal after USR1 (exit code $code), on from what hvdx.keras.Checkpoint last saved, if anything"
elif [ "$code" -ne 0 ] && [ -z "$terminated" ]; then
    hosts=$(@{all_hosts})
    # Where not even this host answers, it is the question that does not work here.
    lost=$(if ask "@{this_host}"; then for host in $hosts; do { ask "$host" || echo "$host"; } & done; wait; fi)
    if [ -n "$lost" ]; then why="lost ${lost//$'\n'/, } (exit code $code)"; fi
fi

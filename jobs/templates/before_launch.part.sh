launcher='' signalled='' announced='' terminated=''
pass_on() {
    signalled=yes announced=yes
    if [ -z "$launcher" ]; then return; fi
    trap '' USR1 # pass it on only once
    kill -USR1 "$launcher" 2>/dev/null
}
trap pass_on USR1
trap 'terminated=yes; pass_on' @{ends}

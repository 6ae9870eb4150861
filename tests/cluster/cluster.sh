#!/usr/bin/env bash
# A real SLURM on this machine, for tests: munged, slurmctld and two virtual nodes on the loopback interface.
#
#   cluster.sh install   Debian packages slurm-wlm and munge, without starting any service of theirs
#   cluster.sh start     write the configuration, start the daemons, wait until both nodes are idle
#   cluster.sh stop      stop exactly the daemons that `start` started, by process id, and take the configuration back
#   cluster.sh kill-node NODE / start-node NODE      a node fails / comes back
#
# Needs root on Debian or Ubuntu; says so and exits with 77 where that is not given, or where the machine has a
# SLURM of its own. SLURM takes SLURM_CONF out of the environment of jobs, so the configuration must be the file
# that every SLURM command finds by itself: /etc/slurm/slurm.conf. It is marked as ours and only ours is replaced.
set -euo pipefail

STATE=${GRAFTING_CLUSTER_STATE:-/var/lib/grafting-test-cluster}
CONF=/etc/slurm/slurm.conf
MARK="# written by grafting's tests/cluster/cluster.sh"
NODES=(c1 c2)
unset SLURM_CONF

skip() { echo "test cluster: $1" >&2; exit 77; }

suitable() {
    [ "$(id -u)" = 0 ] || skip "needs root to install and start SLURM's daemons"
    command -v apt-get >/dev/null || skip "needs Debian or Ubuntu (apt-get)"
    if [ -e "$CONF" ] && ! grep -qF "$MARK" "$CONF"; then
        skip "this machine has a SLURM of its own ($CONF); that is left alone"
    fi
}

install() {
    if command -v slurmctld slurmd munged sbatch >/dev/null; then return; fi
    # Debian starts services at installation; not here. A policy that the machine has already stays.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod +x $policy
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >/dev/null
    apt-get install -qq -y --no-install-recommends slurm-wlm munge >/dev/null
}

configure() {
    (umask 022 && mkdir -p "$STATE/state" "$STATE/munge" "$STATE/log" /etc/slurm)
    for node in "${NODES[@]}"; do mkdir -p "$STATE/spool-$node"; done
    if [ ! -e "$STATE/munge/key" ]; then
        (umask 077 && dd if=/dev/urandom of="$STATE/munge/key" bs=1024 count=1 status=none)
    fi
    cpus=$(nproc --all) # plain nproc heeds OMP_NUM_THREADS
    memory=$(awk '/MemTotal/ {print int($2 / 1024) - 256}' /proc/meminfo)
    host=$(hostname -s)
    cat >"$CONF" <<END
$MARK
ClusterName=grafting
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
AuthType=auth/munge
# a requeued job may start again once its old credential is dead: by default two minutes
AuthInfo=socket=$STATE/munge/socket,cred_expire=10
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$STATE/state
SlurmdSpoolDir=$STATE/spool-%n
SlurmctldPidFile=$STATE/slurmctld.pid
SlurmdPidFile=$STATE/slurmd-%n.pid
SlurmctldLogFile=$STATE/log/slurmctld.log
SlurmdLogFile=$STATE/log/slurmd-%n.log
SlurmdDebug=info
SlurmctldDebug=info
# neither control groups nor accounting: what a container and a bare virtual machine have too
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
# what may start is looked for every two seconds instead of every half minute: a requeued job waits for that
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdTimeout=10
KillWait=20
MinJobAge=300
# refuses an account as accounting would, without a database
JobSubmitPlugins=lua
ReturnToService=2
NodeName=c1 NodeHostname=$host NodeAddr=127.0.0.1 Port=16818 CPUs=$cpus RealMemory=$memory Weight=10 State=UNKNOWN
NodeName=c2 NodeHostname=$host NodeAddr=127.0.0.1 Port=16819 CPUs=$cpus RealMemory=$memory State=UNKNOWN
# main has this machine's cores once, so that times compare with a local run; pair has them twice and takes c2 first
PartitionName=main Nodes=c1 Default=YES MaxTime=1-00:00:00 State=UP
PartitionName=pair Nodes=c1,c2 MaxTime=1-00:00:00 State=UP
PartitionName=brief Nodes=c1 MaxTime=00:10:00 State=UP
END
}

policy() {
    cat >/etc/slurm/job_submit.lua <<END
-- written by grafting's tests/cluster/cluster.sh
function slurm_job_submit(job, partitions, user)
    if job.account == "refused" then return slurm.ESLURM_INVALID_ACCOUNT end
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, user) return slurm.SUCCESS end
return slurm.SUCCESS
END
}

# the process of a pid file, if it is the program that we think it is
running() {
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 1
    [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ] && echo "$pid"
}

stop_one() { # pid file, program, signal
    local pid
    pid=$(running "$1" "$2") || return 0
    kill -"${3:-TERM}" "$pid" 2>/dev/null || true
    for _ in $(seq 100); do
        [ -e "/proc/$pid" ] && [ "$(cut -d' ' -f3 "/proc/$pid/stat" 2>/dev/null)" != Z ] || return 0
        sleep 0.1
    done
    kill -KILL "$pid" 2>/dev/null || true
}

# A node that dies takes everything on it along: its slurmd, its step daemons, and what they started.
kill_node() {
    local pids=() parent
    for entry in /proc/[0-9]*; do
        if tr '\0' '\n' <"$entry/environ" 2>/dev/null | grep -qx "SLURMD_NODENAME=$1"; then
            pids+=("${entry#/proc/}")
            parent=$(cut -d' ' -f4 "$entry/stat" 2>/dev/null || true)
            if [ "$(cat "/proc/$parent/comm" 2>/dev/null)" = slurmstepd ]; then pids+=("$parent"); fi
        fi
    done
    stop_one "$STATE/slurmd-$1.pid" slurmd KILL
    [ ${#pids[@]} = 0 ] || kill -KILL "${pids[@]}" 2>/dev/null || true
}

start_node() {
    # slurmd -N: several on one host, which Debian's build allows
    [ -n "$(running "$STATE/slurmd-$1.pid" slurmd || true)" ] || slurmd -N "$1"
}

start() {
    stop_daemons
    configure
    policy
    munged --key-file="$STATE/munge/key" --socket="$STATE/munge/socket" --pid-file="$STATE/munge/pid" \
        --log-file="$STATE/log/munged.log" --seed-file="$STATE/munge/seed" --force 2>>"$STATE/log/munged.err"
    slurmctld -c
    for node in "${NODES[@]}"; do start_node "$node"; done
    for _ in $(seq 150); do
        if [ "$(sinfo -h -N -p pair -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "${#NODES[@]}" ]; then return; fi
        sleep 0.2
    done
    sinfo -N -l >&2 || true
    tail -n 20 "$STATE"/log/*.log >&2
    echo "test cluster: the nodes did not become idle within 30 s" >&2
    exit 1
}

stop_daemons() {
    for node in "${NODES[@]}"; do stop_one "$STATE/slurmd-$node.pid" slurmd; done
    stop_one "$STATE/slurmctld.pid" slurmctld
    stop_one "$STATE/munge/pid" munged
}

stop() {
    if [ -e "$CONF" ] && grep -qF "$MARK" "$CONF"; then
        timeout 10 scancel --user=root 2>/dev/null || true
        for _ in $(seq 100); do
            [ -n "$(timeout 5 squeue -h 2>/dev/null)" ] || break
            sleep 0.2
        done
    fi
    stop_daemons
    if [ -e "$CONF" ] && grep -qF "$MARK" "$CONF"; then rm -f "$CONF" /etc/slurm/job_submit.lua; fi
}

suitable
case "${1:-}" in
install) install ;;
start) start ;;
stop) stop ;;
kill-node) kill_node "$2" ;;
start-node) start_node "$2" ;;
*) sed -n '2,12p' "$0" >&2; exit 2 ;;
esac

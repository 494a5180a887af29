# A worker of `mpiexec -n 3 dpsgd train`: the trainer, and the ssh by which the MPI operator
# starts it.  The key pair is the operator's, made for each job.
#   docker build -f deploy/containers/trainer-mpi.Dockerfile -t dpsgd-trainer-mpi:0.2.0 .
FROM dpsgd-trainer:0.2.0

USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && printf '%s\n' 'Port 2222' 'PidFile none' 'HostKey /home/trainer/.ssh/id_rsa' \
        'StrictModes no' 'PasswordAuthentication no' 'AllowUsers trainer' \
        > /etc/ssh/worker_sshd_config \
    && printf '%s\n' 'Host *' '  Port 2222' '  StrictHostKeyChecking accept-new' \
        '  UserKnownHostsFile /dev/null' > /etc/ssh/ssh_config
USER 10001:10001
EXPOSE 2222
ENTRYPOINT []
CMD ["/usr/sbin/sshd", "-D", "-e", "-f", "/etc/ssh/worker_sshd_config"]

"""Accounting of a lab: MariaDB on a unix socket in the lab's folder, and slurmdbd on loopback."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.slurm.lab.cluster import Lab

PROGRAMS = ("mariadbd", "mariadb-install-db", "slurmdbd", "sacctmgr", "sacct")
ACCOUNT = "lab"

_SLURMDBD = """\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
CommunicationParameters=NoInAddrAny
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={lab}/munge.sock
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
PidFile={lab}/slurmdbd.pid
LogFile={lab}/slurmdbd.log
CommitDelay=1
"""


def start_accounting(lab: "Lab", port: int) -> None:
    """Start the database, and slurmdbd on `port`; add cluster `lab` and account `lab` with user root."""
    data, socket = lab.folder / "mariadb", lab.folder / "db.sock"
    lab.check("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db")
    flags = [
        "--no-defaults",
        "--user=root",
        "--skip-networking",
        "--skip-grant-tables",
        "--innodb-buffer-pool-size=32M",
    ]
    files = [f"--datadir={data}", f"--socket={socket}", f"--pid-file={lab.folder}/mariadbd.pid"]
    # mariadbd stays in the foreground: setsid puts it in the background, as the other daemons do themselves
    start = 'exec "$@" > "$0" 2>&1 < /dev/null'
    lab.check("setsid", "--fork", "sh", "-c", start, f"{lab.folder}/mariadbd.log", "mariadbd", *flags, *files)
    lab.wait(socket.exists, log="mariadbd.log")
    config = lab.folder / "etc" / "slurmdbd.conf"
    config.touch(mode=0o600)  # slurmdbd refuses a file that others can read
    config.write_text(_SLURMDBD.format(lab=lab.folder, port=port))
    lab.check("env", f"MARIADB_UNIX_PORT={socket}", "slurmdbd")
    lab.wait(lambda: lab.run("sacctmgr", "--noheader", "list", "cluster").returncode == 0, log="slurmdbd.log")
    for what in (
        ["cluster", "lab"],
        ["account", ACCOUNT, "cluster=lab"],
        ["user", "root", f"account={ACCOUNT}", "cluster=lab"],
    ):
        lab.check("sacctmgr", "--immediate", "add", *what)
    lab.check("sacctmgr", "--immediate", "modify", "user", "root", "set", f"defaultaccount={ACCOUNT}")

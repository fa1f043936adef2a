"""Known ways out of a sandbox, each tried. Where the machine cannot isolate, running has to be refused instead."""

import ctypes
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import is_running, until

from rlkit.rewards import sandbox
from rlkit.rewards.isolated import sandboxed
from rlkit.rewards.sandbox import Ran, SandboxError, check_isolation, run_python
from rlkit.rewards.sandbox_inside import canonical

try:
    check_isolation()
    ISOLATED = True
except SandboxError:
    ISOLATED = False

SECRET = "the-secret-of-the-parent"


def run(program: str, **options) -> Ran | None:
    """What the program did; None where the machine cannot isolate it, which has to be said."""
    if ISOLATED:
        return run_python(textwrap.dedent(program), **options)
    with pytest.raises(SandboxError, match="cannot isolate programs|could not start a program"):
        run_python(program, **options)
    return None


def test_it_isolates_where_the_kernel_can():
    """Or every test below would be content with a refusal."""
    landlock = ctypes.CDLL(None).syscall(444, None, 0, 1)
    assert ISOLATED == (landlock >= 3 and platform.machine() == "x86_64")


# --- what a program may do


def test_a_program_reads_computes_and_prints():
    ran = run("import sys\nname = input()\nprint(name[::-1], 'ü')\nprint('oh', file=sys.stderr)\n", stdin="sandbox\n")
    assert ran is None or ran == Ran("xobdnas ü\n", "oh\n", None, 0, "")


def test_an_exception_is_the_programs():
    ran = run("def f():\n    raise KeyError('mine')\nf()")
    if ran:
        assert ran.code == 1 and ran.stdout == "" and 'File "program.py", line 2, in f' in ran.stderr
        assert "KeyError: 'mine'" in ran.stderr


def test_a_call_gives_its_value():
    program = """
        import dataclasses
        @dataclasses.dataclass
        class Pair:
            x: int
        def f(n):
            return [n, (Pair(n).x, 2.0), {"k": {3, 1}}, None]
        if __name__ == "__main__":
            raise SystemExit("a call does not run this")
        """
    ran = run(program, call="f(1)")
    if ran:
        assert ran.value == canonical([1, (1, 2), {"k": {1, 3}}, None]) and ran.code == 0
        assert run("x = 1", call="x +").value is None and run("x = 1").value is None


def test_its_folder_and_the_standard_library_are_there():
    program = """
        import os, sqlite3, decimal, random, heapq, json, hashlib, dataclasses, datetime, typing, re, zlib, uuid
        with open("mine.txt", "w") as file:
            file.write("kept")
        print(open("mine.txt").read(), sorted(os.listdir()), hash("x") != 0, hashlib.sha256(b"").hexdigest()[:4])
        print(sqlite3.connect(":memory:").execute("select 6 * 7").fetchone(), sorted(os.environ))
        """
    ran = run(program)
    if ran:
        first, second = ran.stdout.splitlines()
        assert first.startswith("kept ['mine.txt', 'program.py', 'stderr', 'stdin', 'stdout'] True e3b0"), ran.stderr
        # the interpreter itself adds LC_CTYPE
        assert second.startswith("(42,) ") and set(eval(second[6:])) <= {"LC_CTYPE", "PYTHONHASHSEED"}


def test_what_it_prints_does_not_depend_on_the_run():
    both = [run("print({'a', 'b', 'c', 'd', 'e'})") for _ in range(2)]
    assert both[0] == both[1]


def test_many_at_once_from_threads():
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: run("print(int(input()) ** 2)", stdin=str(i)), range(12)))
    assert found == [None] * 12 or [ran.stdout for ran in found] == [f"{i * i}\n" for i in range(12)]


LOAD_SANDBOX = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("sandbox", {sandbox.__file__!r})
module = importlib.util.module_from_spec(spec)
sys.modules["sandbox"] = module
spec.loader.exec_module(module)
"""


def test_nothing_is_left_behind(tmp_path):
    """In a process of its own: other tests of this one may open and close files, and end processes, meanwhile."""
    code = f"""{LOAD_SANDBOX}
module.check_isolation()
before = set(os.listdir("/proc/self/fd"))
for program in ("open('x', 'w').write('y')", "while True: pass", "import os; os._exit(3)"):
    module.run_python(program, seconds=0.2)
print(os.listdir({str(tmp_path)!r}), set(os.listdir("/proc/self/fd")) == before)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no children")
"""
    if not ISOLATED:
        run("")
        return
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "[] True\nno children\n", done


# --- ways out

# a program; it has `outside` (a folder with a file `secret`), `port`, `listening` (a unix socket) and `parent` (an id),
# and says ESCAPED if it got its way
OUT = """
import ctypes, os, resource, signal, socket, struct, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def succeeded(result):
    if result >= 0: print("ESCAPED")
"""
ESCAPES = {
    "write beside": "open(outside + '/new', 'w').write('x'); print('ESCAPED')",
    "write over": "open(outside + '/secret', 'r+').write('x'); print('ESCAPED')",
    "write to home": "open(home + '/rlkit-escape', 'w').write('x'); print('ESCAPED')",
    "write to /tmp": "open('/tmp/rlkit-escape', 'w').write('x'); print('ESCAPED')",
    "write to /var/tmp": "open('/var/tmp/rlkit-escape', 'w').write('x'); print('ESCAPED')",
    "write to /dev/shm": "open('/dev/shm/rlkit-escape', 'w').write('x'); print('ESCAPED')",
    "dotdot": "open('../rlkit-escape', 'w').write('x'); print('ESCAPED')",
    "directory descriptor": "d = os.open('/', os.O_PATH); os.open('tmp/rlkit-escape', 66, dir_fd=d); print('ESCAPED')",
    "cut a file": "os.truncate(outside + '/secret', 0); print('ESCAPED')",
    "cut a file that is opened to be read": "os.open(outside + '/secret', os.O_TRUNC); print('ESCAPED')",
    "remove": "os.remove(outside + '/secret'); print('ESCAPED')",
    "move away": "os.rename(outside + '/secret', 'mine'); print('ESCAPED')",
    "move over": "open('m', 'w').close(); os.rename('m', outside + '/secret'); print('ESCAPED')",
    "symbolic link": "os.symlink(outside + '/secret', 's'); print(open('s').read(), 'ESCAPED')",
    "hard link": "os.link(outside + '/secret', 'h'); print('ESCAPED')",
    "change a mode": "os.chmod(outside + '/secret', 0o777); print('ESCAPED')",
    "change a mode by fchmodat2": "succeeded(libc.syscall(452, -100, (outside + '/secret').encode(), 0o777, 0))",
    "change an owner": "os.chown(outside + '/secret', 1, 1); print('ESCAPED')",
    "change a time": "os.utime(outside + '/secret', (1, 1)); print('ESCAPED')",
    "extended attribute": "os.setxattr(outside + '/secret', 'user.x', b'x'); print('ESCAPED')",
    "pipe with a name": "os.mkfifo('fifo'); print('ESCAPED')",
    "device": "os.mknod('null', 0o20666, os.makedev(1, 3)); print('ESCAPED')",
    "read a file": "print(open(outside + '/secret').read())",
    "read /etc/passwd": "print(open('/etc/passwd').read(), 'ESCAPED')",
    "list a folder": "print(os.listdir(outside), 'ESCAPED')",
    "parent's environment": "print(open(f'/proc/{parent}/environ').read(), 'ESCAPED')",
    "own environment": "print(dict(os.environ)); print(open('/proc/self/environ').read())",
    "parent's memory": "open(f'/proc/{parent}/mem', 'r+b'); print('ESCAPED')",
    "inherited descriptors": "[print(os.pread(i, 99, 0)) for i in range(3, 64) if exists(i)]",
    "TCP": "socket.create_connection(('127.0.0.1', port), 1); print('ESCAPED')",
    "UDP": "socket.socket(2, 2).sendto(b'x', ('127.0.0.1', port)); print('ESCAPED')",
    "IPv6": "socket.socket(socket.AF_INET6); print('ESCAPED')",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); print('ESCAPED')",
    "unix socket": "s = socket.socket(socket.AF_UNIX); s.connect(listening); print('ESCAPED')",
    "abstract unix socket": "s = socket.socket(1); s.connect(chr(0) + f'rlkit-{parent}'); print('ESCAPED')",
    "fork": "pid = os.fork(); print('ESCAPED')",
    "fork bomb": "while True: succeeded(os.fork())",
    "fork by its number": "succeeded(libc.syscall(57))",
    "vfork": "succeeded(libc.syscall(58))",
    "clone": "succeeded(libc.syscall(56, 17, 0, 0, 0, 0))",
    "clone3": "a = struct.pack('8Q', 0, 0, 0, 0, 17, 0, 0, 0); succeeded(libc.syscall(435, a, 64))",
    "daemon": "os.fork() or (os.setsid(), os.fork() or open(outside + '/daemon', 'w'))",
    "thread bomb": "import _thread\nwhile True: _thread.start_new_thread(print, ('ESCAPED',))",
    "subprocess": "print(subprocess.run(['echo', 'ESCAPED'], capture_output=True).stdout)",
    "shell": "os.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])",
    "system": "succeeded(-os.system('echo ESCAPED'))",
    "interpreter anew": "os.execv(sys.executable, [sys.executable, '-c', 'print(\"ESCAPED\")'])",
    "signal the parent": "os.kill(parent, 0); print('ESCAPED')",
    "signal its group": "os.killpg(0, 0); print('ESCAPED')",
    "signal everyone": "os.kill(-1, 0); print('ESCAPED')",
    "signal a thread": "succeeded(libc.syscall(200, parent, 0))",
    "signal a thread of a process": "succeeded(libc.syscall(234, parent, parent, 0))",
    "signal by descriptor": "succeeded(libc.syscall(424, libc.syscall(434, parent, 0), 0, 0, 0))",
    "signal by owning a pipe": "import fcntl; fcntl.fcntl(os.pipe()[0], 8, parent); print('ESCAPED')",
    "trace the parent": "succeeded(libc.syscall(101, 0x4206, parent, 0, 0))",
    "copy the parent's memory": "succeeded(libc.syscall(310, parent, bytes(16), 1, bytes(16), 1, 0))",
    "raise a limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print('ESCAPED')",
    "raise the parent's limit": "resource.prlimit(parent, resource.RLIMIT_CORE, (0, 0)); print('ESCAPED')",
    "namespace": "succeeded(libc.syscall(272, 0x10000000))",
    "mount": "succeeded(libc.syscall(165, b'none', outside.encode(), b'tmpfs', 0, 0))",
    "root folder": "os.chroot('.'); print('ESCAPED')",
    "another user": "os.setuid(1); print('ESCAPED')",
    "set-user-id by open": "print(oct(os.fstat(os.open('a', os.O_CREAT | os.O_RDWR, 0o4755)).st_mode), 'ESCAPED')",
    "set-group-id by open": "os.umask(0); os.open('a', os.O_CREAT | os.O_RDWR, 0o2777); print('ESCAPED')",
    "set-user-id by its number": "succeeded(libc.syscall(2, b'a', 0o102, 0o4755))",
    "set-user-id by high bits": "succeeded(libc.syscall(257, -100, b'a', 0o102, ctypes.c_ulong(1 << 32 | 0o4755)))",
    "set-user-id without a name": "os.open('.', os.O_TMPFILE | os.O_RDWR, 0o4755); print('ESCAPED')",
    "set-user-id by creat": "succeeded(libc.syscall(85, b'a', 0o4755))",
    "set-user-id by openat2": "succeeded(libc.syscall(437, -100, b'a', struct.pack('3Q', 0o102, 0o4755, 0), 24))",
    "set-user-id by mknod": "os.mknod('a', 0o104755); print('ESCAPED')",
    "set-user-id by chmod": "open('a', 'w'); os.chmod('a', 0o4755); print('ESCAPED')",
    "set-user-id by fchmod": "os.fchmod(open('a', 'w').fileno(), 0o4755); print('ESCAPED')",
    "set-user-id by fchmodat": "open('a', 'w'); succeeded(libc.syscall(268, -100, b'a', 0o4755))",
    "set-user-id by fchmodat2": "open('a', 'w'); succeeded(libc.syscall(452, -100, b'a', 0o4755, 0))",
    "kernel programs": "succeeded(libc.syscall(321, 0, struct.pack('16I', 2, 4, 4, 1, *[0] * 12), 64))",
    "io_uring": "succeeded(libc.syscall(425, 1, bytes(120)))",
    "memory without a limit": "succeeded(libc.syscall(319, b'x', 0))",
    "shared memory": "succeeded(libc.syscall(29, 0, 4096, 0o1600))",
    "keys of the kernel": "succeeded(libc.syscall(250, 0, -3, 0))",
    "terminal": "os.open('/dev/ptmx', os.O_RDWR); print('ESCAPED')",
    "calls of the 32-bit kind": """
import mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex('b814000000cd80c3'))  # getpid by int 0x80
succeeded(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
""",
}  # fmt: skip


@pytest.fixture(scope="module")
def around(tmp_path_factory):
    """A secret file and listeners, none of which a program may reach."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret").write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        with socket.socket(socket.AF_UNIX) as abstract, (folder / "secret").open() as inherited:
            directory = os.open(folder, os.O_PATH)
            unix.bind(f"/proc/self/fd/{directory}/socket")  # the folder's own path may be longer than an address can be
            os.close(directory)
            unix.listen()
            abstract.bind(f"\0rlkit-{os.getpid()}")
            abstract.listen()
            os.set_inheritable(inherited.fileno(), True)
            yield folder, tcp.getsockname()[1]


def state(folder: Path) -> dict:
    return {
        p.name: (p.stat().st_mode, p.stat().st_uid, p.stat().st_mtime_ns, p.stat().st_size) for p in folder.iterdir()
    }


@pytest.mark.parametrize("name", ESCAPES)
def test_escape_fails(name, around, monkeypatch):
    folder, port = around
    monkeypatch.setenv("RLKIT_TEST_TOKEN", SECRET)
    home, cpu = str(Path.home()), resource.getrlimit(resource.RLIMIT_CORE)
    facts = dict(outside=str(folder), port=port, listening=str(folder / "socket"), parent=os.getpid(), home=home)
    given = "".join(f"{key} = {value!r}\n" for key, value in facts.items())
    exists = "def exists(i):\n    try: return bool(os.fstat(i))\n    except OSError: return False\n"
    before = state(folder)
    ran = run(given + OUT + exists + ESCAPES[name], seconds=2)
    if ran:
        assert "ESCAPED" not in ran.stdout and SECRET not in ran.stdout, ran
        assert "SyntaxError" not in ran.stderr and "NameError" not in ran.stderr, ran.stderr  # it did try
        assert ran.code != 0 or name in ("inherited descriptors", "system") or "succeeded(" in ESCAPES[name]
    assert state(folder) == before and (folder / "secret").read_text() == SECRET
    assert resource.getrlimit(resource.RLIMIT_CORE) == cpu
    for place in ("/tmp", "/var/tmp", "/dev/shm", home, os.path.dirname(folder)):
        assert not os.path.exists(f"{place}/rlkit-escape")


@pytest.fixture(scope="module")
def executing():
    sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
    from misbehaving_rewards import executing

    return sandboxed(executing, seconds=2)


@pytest.mark.parametrize("name", ESCAPES)
def test_no_response_escapes_from_a_reward_that_executes_it(name, around, executing, monkeypatch):
    folder, port = around
    monkeypatch.setenv("RLKIT_TEST_TOKEN", SECRET)
    facts = dict(outside=str(folder), port=port, listening=str(folder / "socket"), parent=os.getpid())
    given = "".join(f"{key} = {value!r}\n" for key, value in {**facts, "home": str(Path.home())}.items())
    exists = "def exists(i):\n    try: return bool(os.fstat(i))\n    except OSError: return False\n"
    before = state(folder)
    try:
        assert executing(given + OUT + exists + ESCAPES[name], {"secret": SECRET}) == 0
    except SandboxError:
        assert not ISOLATED
    except RuntimeError as error:  # a system call was refused
        assert "NameError" not in str(error) and "SyntaxError" not in str(error)
    assert state(folder) == before and (folder / "secret").read_text() == SECRET
    for place in ("/tmp", "/var/tmp", "/dev/shm", Path.home(), os.path.dirname(folder)):
        assert not os.path.exists(f"{place}/rlkit-escape")


def test_what_may_be_read_may_not_be_changed(tmp_path, monkeypatch):
    """An owner may cut a file by opening it to be read, which early versions of Landlock let through."""
    (tmp_path / "shown").write_text("as it was")
    readable = sandbox.readable_paths()
    monkeypatch.setattr(sandbox, "readable_paths", lambda: [*readable, str(tmp_path)])
    for attempt in ("os.open(name, os.O_TRUNC)", "open(name, 'a')", "open(name + '2', 'w')", "os.execv(name, [name])"):
        ran = run(f"import os\nname = {str(tmp_path / 'shown')!r}\nprint(open(name).read())\n{attempt}")
        assert ran is None or (ran.stdout, ran.code) == ("as it was\n", 1) and "PermissionError" in ran.stderr
    assert state(tmp_path).keys() == {"shown"} and (tmp_path / "shown").read_text() == "as it was"


@pytest.mark.parametrize(
    ("program", "stopped"),
    [
        ("while True: pass", "time"),
        ("import signal\nfor s in (1, 2, 3, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass", "time"),
        ("try:\n    while True: pass\nexcept BaseException:\n    while True: pass", "time"),
        ("9 ** 9 ** 9", "time"),
        ("import time; time.sleep(1000)", "time"),
        ("import os\nr, w = os.pipe()\nos.read(r, 1)", "time"),
        ("i = 0\nwhile True:\n    open(str(i), 'w').close()\n    i += 1", "output"),
        ("for i in range(9): open(str(i), 'wb').write(bytes(1 << 19))\nimport time; time.sleep(1000)", "output"),
    ],
)  # fmt: skip
def test_it_is_stopped(program, stopped):
    ran = run(program, seconds=0.3 if stopped == "time" else 20)
    assert ran is None or (ran.stopped, ran.code) == (stopped, -9)


def test_a_busy_machine_does_not_use_up_the_time():
    """Processor time is what counts: this one waits longer than its limit, and computes nothing meanwhile."""
    ran = run("import time; time.sleep(1.2); print('done')", seconds=1)
    assert ran is None or (ran.stdout, ran.stopped) == ("done\n", "")


@pytest.mark.parametrize(
    "program",
    [
        "print('x' * 10 ** 8)",
        "import sys\nwhile True: sys.stdout.write('x' * 1000)",
        "import sys\nwhile True: sys.stderr.write('x' * 1000)",
        "import os\nwhile os.write(1, b'x' * 10 ** 5): pass",
        "f = open('big', 'wb')\nwhile f.write(bytes(1 << 20)): pass",
        "import os\nos.truncate(os.open('big', os.O_RDWR | os.O_CREAT), 1 << 40)",
    ],
)
def test_output_is_bounded(program):
    ran = run(program, seconds=5, output=10_000)
    if ran:
        assert ran.code != 0 and len(ran.stdout) <= 10_000 and len(ran.stderr) <= 10_000 and ran.stopped != "time"


def test_the_input_is_no_output():
    """It is measured while the program runs."""
    program = "import sys, time\nprint(len(sys.stdin.read()))\nwhile time.process_time() < 0.2: pass"
    ran = run(program, stdin="x" * 300_000, output=10_000)
    assert ran is None or (ran.stdout, ran.stopped) == ("300000\n", "")


@pytest.mark.parametrize("program", ["x = bytearray(10 ** 10)", "x = []\nwhile True: x.append(bytearray(10 ** 7))",
                                     "import mmap; mmap.mmap(-1, 1 << 32)", "x = 'a' * 10 ** 9"])  # fmt: skip
def test_memory_is_bounded(program):
    ran = run(program + "\nprint('ESCAPED')", seconds=5, memory=200 << 20)
    assert ran is None or ran.code == 1 and ran.stdout == "" and "Error" in ran.stderr


def test_closed_and_unreadable_files_are_the_programs_fault():
    """What a program does to its own files may not look as if the machine had failed: that would spare it a 0."""
    for program in ("import os; os.closerange(0, 64)", "import os; os.open('value', os.O_CREAT, 0)",
                    "open('value', 'w').write('2')", "import os; os.kill(os.getpid(), 9)"):  # fmt: skip
        ran = run(program + "\ndef f(): return 1", call="f()")
        assert ran is None or isinstance(ran, Ran)


def test_it_dies_with_what_started_it(tmp_path):
    code = f"""{LOAD_SANDBOX}
module.check_isolation()
start = module._start
def spy(*args):
    process = start(*args)
    print(process.pid, flush=True)
    return process
module._start = spy
module.run_python("import time; time.sleep(1000)", seconds=1000)
"""
    if not ISOLATED:
        run("")
        return
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # what is killed leaves its folder
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as parent:
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
    until(lambda: not is_running(child))


# --- where the machine cannot


def test_it_refuses_where_a_part_is_missing(tmp_path):
    """A kernel without Landlock, made by a filter of our own, and one without system call filters."""
    for number, words in ((444, "Landlock version 3"), (157, "PR_SET_")):
        code = f"""{LOAD_SANDBOX}
import ctypes, struct
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, {number}), (0x06, 0, 0, 0x00050026), (0x06, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("HxxxxxxP", 4, ctypes.addressof(code)), 0, 0) == 0
for _ in range(2):
    try:
        print(module.run_python("print(1)"))
    except module.SandboxError as error:
        print("refused:", error)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
        if ISOLATED:
            lines = done.stdout.splitlines()
            assert len(lines) == 2 and all("refused: cannot isolate programs" in line for line in lines), done
            assert all(words in line for line in lines), done


@pytest.mark.parametrize(
    ("old", "new", "holes"),
    [
        ("landlock(libc, readable, writable)", "pass", ["read", "write", "create", "proc"]),
        (
            "return [*code, answer(refuse)]",
            "return [answer(allow)]",
            ["tcp", "fork", "thread", "chmod", "kill", "set_user_id", "set_group_id"],
        ),
        ("resource.RLIMIT_AS: memory,", "", ["memory"]),
        ("resource.RLIMIT_FSIZE: output,", "", ["file_size'|stopped='output"]),  # or seen from outside before that
    ],
)
def test_the_probe_finds_a_part_that_does_nothing(old, new, holes, tmp_path, monkeypatch):
    """Restrictions that are accepted and do not hold: the probe of the first use says which."""
    source = Path(sandbox.INSIDE).read_text()
    assert source.count(old) == 1
    (tmp_path / "inside.py").write_text(source.replace(old, new))
    monkeypatch.setattr(sandbox, "INSIDE", str(tmp_path / "inside.py"))
    with pytest.raises(SandboxError, match="cannot isolate programs on this machine") as error:
        check_isolation.__wrapped__()
    assert not ISOLATED or all(re.search(f"'{hole}'", str(error.value)) for hole in holes), error.value


def test_a_start_that_fails_is_not_the_programs_fault(tmp_path, monkeypatch):
    """Also when it is a later one, after all was well."""
    (tmp_path / "inside.py").write_text("raise SystemExit('no memory left')")
    monkeypatch.setattr(sandbox, "INSIDE", str(tmp_path / "inside.py"))
    with pytest.raises(SandboxError, match="cannot isolate programs on this machine: .*no memory left"):
        run_python("print(1)")


def test_another_machine_is_refused(monkeypatch):
    check_isolation.cache_clear()
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "aarch64")
    with pytest.raises(SandboxError, match="expected Linux on x86-64, got linux aarch64"):
        run_python("print(1)")
    monkeypatch.undo()
    assert not ISOLATED or run_python("print(1)").stdout == "1\n"


# --- values


def test_canonical_is_equality():
    same = [(1, 1.0, True), (0, False, -0.0), ([1], [1.0]), ({1, 2}, frozenset({2, 1})), ({1: 2, 3: 4}, {3: 4, 1: 2})]
    for values in same:
        assert len({canonical(value) for value in values}) == 1, values
    different = [1, "1", None, "None", [1], (1,), {1}, {1: 1}, [], (), set(), {}, 1.5, [1, 1], [[1], 1], [[1, 1]],
                 "", "[1]", b"1", 10**5000, "a,b", ["a", "b"], ["a,b"], float("inf"), -1, 1e308]  # fmt: skip
    assert len({canonical(value) for value in different}) == len(different)

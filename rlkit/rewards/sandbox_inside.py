"""What `rlkit.rewards.sandbox` starts: a script that restricts its own process, for good, and runs a program in it.

It imports little, so that it starts soon: nothing of rlkit, and no module that a restricted process would have to find.
"""

import builtins
import ctypes
import os
import resource
import signal
import struct
import sys
import types

# Linux, x86-64: the calls that a running interpreter needs. Not among them, on purpose: anything that makes a process,
# a thread, a socket, a link, a directory or shared memory, signals others, or changes what a file or a limit is.
ALLOWED = {
    "read": 0,
    "write": 1,
    "readv": 19,
    "writev": 20,
    "pread64": 17,
    "pwrite64": 18,
    "lseek": 8,
    "close": 3,
    "close_range": 436,
    "ftruncate": 77,
    "fsync": 74,
    "fdatasync": 75,
    "getdents64": 217,
    "stat": 4,
    "lstat": 6,
    "fstat": 5,
    "newfstatat": 262,
    "statx": 332,
    "access": 21,
    "faccessat": 269,
    "faccessat2": 439,
    "readlink": 89,
    "readlinkat": 267,
    "getcwd": 79,
    "umask": 95,
    "dup": 32,
    "dup2": 33,
    "dup3": 292,
    "pipe": 22,
    "pipe2": 293,
    "poll": 7,
    "ppoll": 271,
    "select": 23,
    "pselect6": 270,
    "mmap": 9,
    "mprotect": 10,
    "munmap": 11,
    "brk": 12,
    "mremap": 25,
    "madvise": 28,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "sigaltstack": 131,
    "restart_syscall": 219,
    "futex": 202,
    "set_robust_list": 273,
    "rseq": 334,
    "membarrier": 324,
    "sched_yield": 24,
    "sched_getaffinity": 204,
    "nanosleep": 35,
    "clock_nanosleep": 230,
    "clock_gettime": 228,
    "clock_getres": 229,
    "gettimeofday": 96,
    "time": 201,
    "times": 100,
    "getrusage": 98,
    "getrlimit": 97,
    "sysinfo": 99,
    "uname": 63,
    "getrandom": 318,
    "getpid": 39,
    "getppid": 110,
    "gettid": 186,
    "getuid": 102,
    "geteuid": 107,
    "getgid": 104,
    "getegid": 108,
    "getresuid": 118,
    "getresgid": 120,
    "getgroups": 115,
    "exit": 60,
    "exit_group": 231,
}
OPEN, OPENAT = 2, 257
KILL, TGKILL, IOCTL, FCNTL, PRLIMIT = 62, 234, 16, 72, 302
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
CAPSET = 126


def canonical(value: object) -> str:
    """A text that is the same for two plain values exactly if they are equal: numbers, strings, None, and lists,
    tuples, sets and mappings of them."""
    if isinstance(value, bool | int) or isinstance(value, float) and value.is_integer():
        return f"{int(value):x}"  # decimal digits of a long number are refused, and slow
    if isinstance(value, list | tuple):
        return f"{'list' if isinstance(value, list) else 'tuple'}({','.join(map(canonical, value))})"
    if isinstance(value, set | frozenset):
        return f"set({','.join(sorted(map(canonical, value)))})"
    if isinstance(value, dict):
        return f"dict({','.join(sorted(f'{canonical(key)}:{canonical(item)}' for key, item in value.items()))})"
    return repr(value)


def main(call: str, seconds: float, memory: int, output: int, said_ready: int, readable: list[str]) -> None:
    try:
        restrict(int(seconds) + 2, memory, output, readable, os.getcwd())
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    os.write(said_ready, b"1")  # nothing that the program does can unsay it
    os.close(said_ready)
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as `site` has them, which is not imported
    name = "program" if call else "__main__"
    module = types.ModuleType(name)
    module.__dict__["__file__"] = "program.py"
    sys.modules[name], sys.argv = module, ["program.py"]
    with open("program.py") as file:
        source = file.read()
    exec(compile(source, "program.py", "exec"), module.__dict__)
    if call:
        value = canonical(eval(call, module.__dict__))
        with open("value", "w") as file:
            file.write(value)


def restrict(seconds: int, memory: int, output: int, readable: list[str], writable: str | None) -> None:
    """Hold this process to what the module says, for good; without a `writable` folder it can create no file."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prctl(name: str, option: int, first: int, second: int | bytes = 0) -> None:
        rest = second if isinstance(second, bytes) else ctypes.c_ulong(second)
        checked(name, libc.prctl(option, ctypes.c_ulong(first), rest, ctypes.c_ulong(0), ctypes.c_ulong(0)))

    prctl("PR_SET_PDEATHSIG", 1, signal.SIGKILL)  # it dies with what started it
    for which, most in {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: output,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }.items():
        resource.setrlimit(which, (most, most))
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    checked("capset", libc.syscall(CAPSET, header, bytes(24)))
    prctl("PR_SET_NO_NEW_PRIVS", 38, 1)
    landlock(libc, readable, writable)
    code = system_call_filter(os.getpid())
    buffer = ctypes.create_string_buffer(b"".join(code))
    prctl("PR_SET_SECCOMP", 22, 2, struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer)))


def landlock(libc: ctypes.CDLL, readable: list[str], writable: str | None) -> None:
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 3:  # 1 and 2 let a file that may be read be cut short
        raise OSError(f"expected Landlock version 3 (Linux 6.2), got {max(version, 0)}")
    write_file, read_file, read_dir, make_reg, truncate = (1 << bit for bit in (1, 2, 3, 8, 14))
    rules = checked("Landlock", libc.syscall(LANDLOCK_CREATE, struct.pack("Q", (1 << 15) - 1), ctypes.c_size_t(8), 0))
    granted = {path: read_file | (read_dir if os.path.isdir(path) else 0) for path in readable if os.path.exists(path)}
    if writable is not None:
        granted[writable] = read_file | read_dir | write_file | make_reg | truncate
    for path, rights in granted.items():
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        checked(f"Landlock on {path}", libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, place), 0))
        os.close(place)
    checked("Landlock", libc.syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def system_call_filter(pid: int) -> list[bytes]:
    """A seccomp program: the allowed calls, a few of them with some arguments alone; EPERM for all others."""
    allow, refuse, end = 0x7FFF0000, 0x00050001, 0x80000000

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value & 0xFFFFFFFF)

    def load(offset: int) -> bytes:
        return instruction(0x20, offset)

    def equal(value: int, otherwise: int) -> bytes:
        return instruction(0x15, value, 0, otherwise)

    def answer(value: int) -> bytes:
        return instruction(0x06, value)

    def when(number: int, argument: int, values: list[int]) -> list[bytes]:
        """Allow the call if its argument, all 64 bits of it, is one of the values."""
        low = 16 + 8 * argument
        body = [load(low + 4), equal(0, 2 * len(values) + 1), load(low)]
        body += [step for value in values for step in (equal(value, 1), answer(allow))]
        body.append(answer(refuse))
        return [equal(number, len(body)), *body]

    def without_bits(number: int, argument: int, bits: int) -> list[bytes]:
        """Allow the call if none of these bits is set in its argument."""
        any_set = instruction(0x45, bits, 1, 0)
        return [equal(number, 4), load(16 + 8 * argument), any_set, answer(allow), answer(refuse)]

    code = [load(4), instruction(0x15, 0xC000003E, 1, 0), answer(end), load(0)]  # the native kind of call alone
    for number in ALLOWED.values():
        code += [equal(number, 1), answer(allow)]
    # a new file cannot have the set-user-id, set-group-id or sticky bit
    code += without_bits(OPEN, 2, 0o7000) + without_bits(OPENAT, 3, 0o7000)
    code += when(KILL, 0, [pid]) + when(TGKILL, 0, [pid])
    code += when(IOCTL, 1, [0x5401, 0x5450, 0x5451])  # is it a terminal; close on exec, or not
    code += when(FCNTL, 1, [0, 1, 2, 3, 4, 1030])  # copies and flags; not F_SETOWN, which can have others signalled
    code += when(PRLIMIT, 2, [0])  # limits are read, not set
    return [*code, answer(refuse)]


def checked(name: str, result: int) -> int:
    if result < 0:
        raise OSError(f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


if __name__ == "__main__":
    _, given_call, given_seconds, given_memory, given_output, descriptor, *paths = sys.argv
    main(given_call, float(given_seconds), int(given_memory), int(given_output), int(descriptor), paths)

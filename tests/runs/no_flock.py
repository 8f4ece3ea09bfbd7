"""`python -m tests.runs.no_flock ENOLCK COMMAND...`: the command runs where flock fails, as on some NFS mounts.

The kernel gives the error: a filter of system calls is installed, which the command and its children inherit.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000
_FLOCK = {"x86_64": 73, "aarch64": 32}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def forbid_flock(error: int) -> None:
    """Installs the filter for this process and all its later children."""
    instructions = (
        (_LOAD, 0, 0, 0),  # the number of the system call
        (_JUMP_IF_EQUAL, 0, 1, _FLOCK[platform.machine()]),
        (_RETURN, 0, 0, _FAIL_WITH | error),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    program = _Program(len(instructions), code)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program))):
        if prctl(*arguments):
            raise OSError(ctypes.get_errno(), "no filter of system calls can be installed")


if __name__ == "__main__":
    forbid_flock(getattr(errno, sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])

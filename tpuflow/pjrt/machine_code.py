"""The entries' machine code by the host's architecture: a row for each, of a few instructions an entry.

An entry takes the address of its argument struct, words of 8 bytes, and returns 0: no error. Word 2 is the object; results go to word 3 on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MachineCode:
    """An architecture's instructions.

    nothing: return. call_back: call the function in word 3 with (no error, word 4), for every event is ready at once. copy(fields): write
    these words of the object's header. constant(value): write a number. push(head): put the object onto the list whose head is at this
    address, linked by the first word of its header; a null pointer is left alone. listing and take(head) are functions (header, handles,
    room): write how many objects are on the list from this header on, at most `room`, and their handles; return the header where the list
    goes on. `take` begins at the head, which it empties.
    """

    nothing: bytes
    call_back: bytes
    listing: bytes
    copy: Callable[[Sequence[int]], bytes]
    constant: Callable[[int], bytes]
    push: Callable[[int], bytes]
    take: Callable[[int], bytes]


_BEGIN = bytes.fromhex("f30f1efa")  # endbr64
_DONE = bytes.fromhex("31c0 c3")  # xor eax, eax; ret


def _x86_64_copy(fields: Sequence[int]) -> bytes:
    # mov rax, [args + 2 words]; then for each: mov rcx, [rax + field]; mov [args + 3 words + place], rcx
    moves = (bytes((0x48, 0x8B, 0x48, 8 * field, 0x48, 0x89, 0x4F, 8 * (3 + place))) for place, field in enumerate(fields))
    return _BEGIN + bytes.fromhex("488b4710") + b"".join(moves) + _DONE


def _x86_64_constant(value: int) -> bytes:
    return _BEGIN + bytes.fromhex("48c74718") + value.to_bytes(4, "little") + _DONE  # mov qword [args + 3 words], value


_X86_64_PUSH = (
    "488b4710"  # mov rax, [args + 2 words]
    "4885c0 741a"  # test rax, rax; jz done
    "48b9 {head}"  # mov rcx, head
    "4889c2"  # mov rdx, rax
    "488b01"  # again: mov rax, [rcx]
    "488902"  # mov [rdx], rax
    "f0480fb111"  # lock cmpxchg [rcx], rdx
    "75f3"  # jne again
)
_X86_64_LISTING = (
    "31c9"  # xor ecx, ecx: how many there are so far
    "4885ff 7412"  # again: test header, header; jz done
    "4839d1 740d"  # cmp rcx, room; je done
    "48897cce08"  # mov [handles + rcx + 1 words], header
    "488b3f"  # mov header, [header]
    "48ffc1 ebe9"  # inc rcx; jmp again
    "48890e"  # done: mov [handles], rcx
    "4889f8 c3"  # mov rax, header; ret
)
_X86_64_TAKE = "48b9 {head} 31ff 488739" + _X86_64_LISTING  # mov rcx, head; xor edi, edi; xchg [rcx], rdi

X86_64 = MachineCode(
    nothing=_BEGIN + _DONE,
    call_back=_BEGIN + bytes.fromhex(
        "488b4718"  # mov rax, [args + 3 words]
        "488b7720"  # mov rsi, [args + 4 words]
        "31ff"  # xor edi, edi
        "4883ec08 ffd0 4883c408"  # sub rsp, 8; call rax; add rsp, 8
    ) + _DONE,
    listing=_BEGIN + bytes.fromhex(_X86_64_LISTING),
    copy=_x86_64_copy,
    constant=_x86_64_constant,
    push=lambda head: _BEGIN + bytes.fromhex(_X86_64_PUSH.format(head=head.to_bytes(8, "little").hex())) + _DONE,
    take=lambda head: _BEGIN + bytes.fromhex(_X86_64_TAKE.format(head=head.to_bytes(8, "little").hex())),
)  # fmt: skip


def _aarch64(*instructions: int) -> bytes:
    return b"".join(word.to_bytes(4, "little") for word in (0xD503245F, *instructions))  # bti c


_RETURN_0 = (0xD2800000, 0xD65F03C0)  # mov x0, #0; ret


def _move(register: int, value: int) -> tuple[int, ...]:
    """A number of 64 bits into a register: movz, and movk three times."""
    halves = [(value >> 16 * i & 0xFFFF) << 5 | i << 21 | register for i in range(4)]
    return (0xD2800000 | halves[0], *(0xF2800000 | half for half in halves[1:]))


def _aarch64_copy(fields: Sequence[int]) -> bytes:
    # ldr x1, [args + 2 words]; then for each: ldr x2, [x1 + field]; str x2, [args + 3 words + place]
    moves = [code for place, field in enumerate(fields) for code in (0xF9400022 | field << 10, 0xF9000002 | (3 + place) << 10)]
    return _aarch64(0xF9400801, *moves, *_RETURN_0)


_AARCH64_PUSH = (
    0xF9400801,  # ldr x1, [args + 2 words]
    0xB4000101,  # cbz x1, done
    0xF9400043,  # again: ldr x3, [x2]
    0xF9000023,  # str x3, [x1]
    0xC85FFC44,  # retry: ldaxr x4, [x2]
    0xEB03009F,  # cmp x4, x3
    0x54FFFF81,  # b.ne again
    0xC805FC41,  # stlxr w5, x1, [x2]
    0x35FFFF85,  # cbnz w5, retry
)
_AARCH64_LISTING = (
    0xD2800003,  # mov x3, #0: how many there are so far
    0xB4000100,  # again: cbz header, done
    0xEB02007F,  # cmp x3, room
    0x540000C0,  # b.eq done
    0x8B030C24,  # add x4, handles, x3, lsl #3
    0xF9000480,  # str header, [x4 + 1 word]
    0xF9400000,  # ldr header, [header]
    0x91000463,  # add x3, x3, #1
    0x17FFFFF9,  # b again
    0xF9000023,  # done: str x3, [handles]
    0xD65F03C0,  # ret
)
_AARCH64_TAKE = (
    0xC85FFC80,  # again: ldaxr x0, [x4]
    0xC805FC9F,  # stlxr w5, xzr, [x4]
    0x35FFFFC5,  # cbnz w5, again
)

AARCH64 = MachineCode(
    nothing=_aarch64(*_RETURN_0),
    call_back=_aarch64(
        0xA9BF7BFD,  # stp x29, x30, [sp, #-16]!
        0x910003FD,  # mov x29, sp
        0xF9400C08,  # ldr x8, [args + 3 words]
        0xF9401001,  # ldr x1, [args + 4 words]
        0xD2800000,  # mov x0, #0
        0xD63F0100,  # blr x8
        0xA8C17BFD,  # ldp x29, x30, [sp], #16
        *_RETURN_0,
    ),
    listing=_aarch64(*_AARCH64_LISTING),
    copy=_aarch64_copy,
    constant=lambda value: _aarch64(*_move(1, value), 0xF9000C01, *_RETURN_0),  # str x1, [args + 3 words]
    push=lambda head: _aarch64(*_move(2, head), *_AARCH64_PUSH, *_RETURN_0),
    take=lambda head: _aarch64(*_move(4, head), *_AARCH64_TAKE, *_AARCH64_LISTING),
)

MACHINES: Mapping[str, MachineCode] = {"x86_64": X86_64, "amd64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}
"""By `platform.machine()` in lower case; the calling conventions are those of Linux and macOS."""

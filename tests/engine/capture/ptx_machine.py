"""A machine for small PTX kernels: runs text thread by thread, so that what an instrumented kernel marks can be seen without a GPU.

Knows the instructions of the samples and of the pass, no more; an unknown one fails loudly. Barriers hold all threads of a block.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.capture.ptx_text import Function, Statement, blanked, functions

_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_LABEL = re.compile(r"(?m)^[ \t]*([$\w]+):(?!:)")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.\w+\s+([\w$]+)")
_VARIABLE = re.compile(r"\.(?:global|shared)\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d+)\]")
_ADDRESS = re.compile(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\d+))?\s*\]")


@dataclass
class Memory:
    """Byte arrays at addresses."""

    ranges: dict[int, bytearray] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    top: int = 1 << 20

    def allocate(self, byte_count: int, name: str = "") -> int:
        address, self.top = self.top, self.top + (byte_count + 4095) // 4096 * 4096 + 4096
        self.ranges[address] = bytearray(byte_count)
        if name:
            self.names[name] = address
        return address

    def view(self, address: int, byte_count: int) -> memoryview:
        for start, data in self.ranges.items():
            if start <= address and address + byte_count <= start + len(data):
                return memoryview(data)[address - start : address - start + byte_count]
        raise AssertionError(f"{byte_count} bytes at {address:#x} belong to nobody")

    def array(self, address: int, kind: str, count: int) -> np.ndarray:
        return np.frombuffer(self.view(address, count * np.dtype(kind).itemsize), dtype=kind)


class Machine:
    """One module, loaded."""

    def __init__(self, text: str) -> None:
        self.memory = Memory()
        code = blanked(text)
        self.functions = {function.name: function for function in functions(text)}
        self.labels: dict[str, dict[str, int]] = {}
        self.parameters: dict[str, list[str]] = {}
        for function in self.functions.values():
            body = [(m.group(1), m.end()) for m in _LABEL.finditer(code, function.body_start, function.body_end)]
            self.labels[function.name] = {name: _index(function, at) for name, at in body}
            header = code[: function.body_start]
            head = header[max(header.rfind(".entry"), header.rfind(".func")) :]
            self.parameters[function.name] = _PARAMETER.findall(head)
        for name, size in _VARIABLE.findall(code):
            self.memory.allocate(int(size), name)

    def launch(self, kernel: str, blocks: int, threads: int, arguments: list[tuple[str, Any]]) -> None:
        """Run a grid; arguments are (struct format, value)."""
        values = {
            name: bytearray(struct.pack("<" + kind, value))
            for name, (kind, value) in zip(self.parameters[kernel], arguments, strict=True)
        }
        for block in range(blocks):
            special = {"%ctaid.x": block, "%ntid.x": threads, "%nctaid.x": blocks, "%tid.y": 0, "%tid.z": 0}
            running = [self._run(kernel, values, {**special, "%tid.x": thread}) for thread in range(threads)]
            while running:
                still = [thread for thread in running if next(thread, None) is not None]
                assert not still or len(still) == len(running), (
                    "some threads of a block wait at a barrier for others that ended"
                )
                running = still

    def _run(self, name: str, parameters: dict[str, bytearray], special: dict[str, int]) -> Iterator[str]:
        """One thread in one function; yields at barriers."""
        function, registers = self.functions[name], dict(special)
        local: dict[str, bytearray] = dict(parameters)
        at = 0
        while at < len(function.statements):
            statement = function.statements[at]
            at += 1
            if statement.code.startswith("."):
                for found in _PARAMETER.findall(statement.code):
                    local[found] = bytearray(16)
                continue
            if statement.predicate is not None:
                register, negated = statement.predicate
                if bool(registers[register]) == negated:
                    continue
            operation = statement.operation
            if operation == "ret":
                return
            if operation.startswith("bar."):
                yield "barrier"
            elif operation.startswith("bra"):
                at = self.labels[name][statement.operands]
            elif operation.startswith("call"):
                target, given = re.split(r",\s*\(", re.sub(r"\s+", " ", statement.operands).rstrip(") "), maxsplit=1)
                passed = [local[argument.strip()] for argument in given.split(",")]
                inner = dict(zip(self.parameters[target.strip()], passed, strict=True))
                yield from self._run(target.strip(), inner, special)
            else:
                self._step(statement, registers, local)

    # ------------------------------------------------------------ instructions

    def _step(self, statement: Statement, registers: dict[str, Any], local: dict[str, bytearray]) -> None:
        kind, *modifiers = statement.operation.split(".")
        if kind in ("ld", "st", "atom", "red"):
            self._memory(kind, modifiers, statement.operands, registers, local)
            return
        target, *sources = [part.strip() for part in statement.operands.split(",")]
        values = [self._value(source, registers) for source in sources]
        registers[target] = _computed(kind, modifiers, values)

    def _value(self, text: str, registers: dict[str, Any]) -> Any:
        if text.startswith("0f"):
            return np.frombuffer(bytes.fromhex(text[2:])[::-1], dtype="<f4")[0]
        if text in self.memory.names:
            return self.memory.names[text]
        return registers[text] if text.startswith("%") else int(text, 0)

    def _memory(
        self, kind: str, modifiers: list[str], operands: str, registers: dict[str, Any], local: dict[str, bytearray]
    ) -> None:
        found = _ADDRESS.search(operands)
        assert found is not None, operands
        item, count = modifiers[-1], int(next((m[1:] for m in modifiers if re.fullmatch(r"v\d", m)), "1"))
        size = _SIZES[item[1:]]
        offset = int(found.group(2) or 0)
        if found.group(1) in local and "param" in modifiers:
            view = memoryview(local[found.group(1)])[offset : offset + size * count]
        else:
            view = self.memory.view(self._value(found.group(1), registers) + offset, size * count)
        dtype = np.dtype(f"<f{size}" if item[0] == "f" else f"<u{size}")
        cells = np.frombuffer(view, dtype=dtype)
        others = [part.strip(" {}") for part in (operands[: found.start()] + operands[found.end() :]).split(",")]
        names = [name for name in others if name]
        if kind == "ld":
            for name, value in zip(names, cells, strict=True):
                registers[name] = np.float32(value) if item[0] == "f" else int(value)
        elif kind == "st":
            cells[:] = [self._stored(name, registers, dtype) for name in names]
        else:
            before, operand = int(cells[0]), self._value(names[-1], registers)
            cells[0] = (before | operand) if "or" in modifiers else (before + operand) % (1 << 8 * size)
            if kind == "atom":
                registers[names[0]] = before

    def _stored(self, name: str, registers: dict[str, Any], dtype: np.dtype) -> Any:
        value = self._value(name, registers)
        if dtype.kind == "f":
            return value
        if isinstance(value, np.floating):
            return int(np.float32(value).view(np.uint32))
        return value % (1 << 8 * dtype.itemsize)


def _index(function: Function, at: int) -> int:
    return next(
        (i for i, statement in enumerate(function.statements) if statement.start >= at), len(function.statements)
    )


def _computed(kind: str, modifiers: list[str], values: list[Any]) -> Any:
    item = modifiers[-1]
    if item == "f32":
        if kind == "fma":
            return np.float32(np.float64(values[0]) * np.float64(values[1]) + np.float64(values[2]))
        assert (kind, modifiers[0]) == ("setp", "leu"), kind
        return not values[0] > values[1]
    bits = int(item[1:])
    if kind == "cvta":
        return values[0]
    if kind == "cvt":
        return _typed(values[0], item) % (1 << int(modifiers[-2][1:]))
    signed = [_typed(value, item) for value in values]
    if kind == "setp":
        compare = {"eq": "__eq__", "ne": "__ne__", "lt": "__lt__", "ge": "__ge__", "gt": "__gt__", "le": "__le__"}
        return getattr(signed[0], compare[modifiers[0]])(signed[1])
    wide = 2 * bits if "wide" in modifiers else bits
    results = {
        "mov": lambda: signed[0],
        "add": lambda: signed[0] + signed[1],
        "sub": lambda: signed[0] - signed[1],
        "mul": lambda: signed[0] * signed[1],
        "mad": lambda: signed[0] * signed[1] + signed[2],
        "shl": lambda: signed[0] << values[1],
        "shr": lambda: signed[0] >> values[1],
        "and": lambda: signed[0] & signed[1],
        "or": lambda: signed[0] | signed[1],
    }
    return results[kind]() % (1 << wide)


def _typed(value: int, item: str) -> int:
    """A register's bits as the instruction's type reads them."""
    bits = int(item[1:])
    value %= 1 << bits
    return value - (1 << bits) if item[0] == "s" and value >> (bits - 1) else value

"""Prefix cache: the chain hash of a full block's tokens -> the block that holds their K and V.

A block's hash covers its own tokens and, through its parent's hash, everything before them; the first parent covers
the salt. So equal hashes mean equal prefixes. The hash is BLAKE2b of 256 bits: a collision, even a deliberate one,
would serve one client the context of another, so a fast non-cryptographic hash will not do.
"""

from __future__ import annotations

import hashlib
import struct


class PrefixCache:
    """A map in both directions. It owns no references: the block pool decides what lives."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.generation = 0  # raised by reset(): hashes of different generations never match
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._pack = struct.Struct(f"<{block_size}q").pack

    def __len__(self) -> int:
        return len(self._block_of)

    def extend_hashes(self, hashes: list[bytes], tokens: list[int], count: int, salt: str | None) -> None:
        """Make ``hashes`` cover the first ``count`` full blocks of ``tokens``; the ones there already are kept."""
        if len(hashes) >= count:
            return
        size, pack, blake2b = self.block_size, self._pack, hashlib.blake2b
        parent = hashes[-1] if hashes else self._root(salt)
        for start in range(len(hashes) * size, count * size, size):
            parent = blake2b(parent + pack(*tokens[start : start + size]), digest_size=32).digest()
            hashes.append(parent)

    def match(self, hashes: list[bytes], count: int) -> list[int]:
        """The blocks that hold the longest cached prefix of ``hashes[:count]``.

        Changes nothing. The answer is good until the next allocation from the pool.
        """
        blocks, block_of = [], self._block_of
        for i in range(count):
            block = block_of.get(hashes[i])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def block_of(self, block_hash: bytes, default: int) -> int:
        """The block that answers for ``block_hash``; like ``match``, it changes nothing."""
        return self._block_of.get(block_hash, default)

    def publish(self, block_hash: bytes, block: int) -> None:
        """From now on ``block`` answers for ``block_hash``, unless another block does already."""
        if block_hash not in self._block_of:
            self.forget(block)
            self._block_of[block_hash] = block
            self.hash_of[block] = block_hash

    def forget(self, block: int) -> None:
        """The block is about to be overwritten."""
        block_hash = self.hash_of[block]
        if block_hash is not None:
            self.hash_of[block] = None
            del self._block_of[block_hash]

    def reset(self) -> None:
        """Forget everything; K and V computed so far, those of running sequences too, will never be hit."""
        self.generation += 1
        self._block_of.clear()
        self.hash_of = [None] * len(self.hash_of)

    def _root(self, salt: str | None) -> bytes:
        mark = b"none" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(struct.pack("<qq", self.generation, self.block_size) + mark, digest_size=32).digest()

"""Prints a tree for tests, crash dumps and people."""

from __future__ import annotations

from radixkv.tree.node import Node
from radixkv.types import PAGE_ID_BYTES, TOKEN_BYTES


def render(root: Node, first_tokens: int = 4) -> str:
    """One line a node: indent by depth, first tokens, page ids, holders, stamp. Without recursion."""
    lines = []
    stack: list[tuple[Node, int]] = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        tokens = [
            int.from_bytes(node.tokens[at : at + TOKEN_BYTES], "little")
            for at in range(0, min(len(node.tokens), first_tokens * TOKEN_BYTES), TOKEN_BYTES)
        ]
        pages = [
            int.from_bytes(node.pages[at : at + PAGE_ID_BYTES], "little")
            for at in range(0, len(node.pages), PAGE_ID_BYTES)
        ]
        lines.append(f"{'  ' * depth}tokens={tokens} pages={pages} holders={node.holders} stamp={node.stamp}")
        stack.extend((child, depth + 1) for child in reversed((node.children or {}).values()))
    return "\n".join(lines)

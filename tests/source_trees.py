"""Syntax trees of source files, parsed once for all tests that read them."""

import ast
import functools


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def nodes_of(path):
    """Every node of a file's tree: walking there takes longer than what the rules ask of a node."""
    return list(ast.walk(tree_of(path)))

"""Images seen as something else, as rows of tokens: what maps their elements is done before."""

from __future__ import annotations

from needle.graph import Graph, Node
from needle.op import Spec
from needle.ops.common import Elementwise
from needle.ops.shape.basic import View
from needle.targets.branches import add
from needle.targets.images import PLAIN, images


def maps_before_views(graph: Graph) -> Graph:
    """The graph in which f(view(image)) is view(f(image)) for maps f of one input, so that a layer's kernel can end in them."""
    found, users = images(graph), graph.users()
    seen: dict[Node, tuple[Node, list[Node]]] = {}  # of an image seen as something else: the image, and the views of it
    moved = False

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        nonlocal moved
        if node.kind != "op" or len(node.args) != 1:
            return None
        x, op = node.args[0], node.target
        if users[x] != [node] or not (x in seen or (x in found and isinstance(x.meta["spec"], Spec))):
            return None
        image, views = seen.get(x) or (done[x], [])
        if isinstance(op, View):
            seen[node] = image, [*views, node]
        elif views and maps(node):
            image, moved = add(new, op, [image], node), True
            seen[node] = image, views
            for v in views:
                image = add(new, v.target, [image], v)
            return image
        return None

    made = graph.copy(replace)
    return made.prune() if moved else graph


def maps(node: Node) -> bool:
    op, out = node.target, node.meta["spec"]
    return isinstance(op, Elementwise) and not isinstance(op, PLAIN) and out == node.args[0].meta["spec"]

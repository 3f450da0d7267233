"""How objects that people look at show themselves."""

import html


class Shown:
    """`str` tells all, `repr` its first line, and a notebook shows all of it."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {str(self).partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

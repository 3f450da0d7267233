"""Ops that move elements: shapes, indices, joins, pads, arrays made anew."""

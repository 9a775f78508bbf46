"""Loaded graphs made of DGL's."""

from typing import Any

from data import GraphMeta, LoadedGraph


def loaded_from_dgl(graph: Any, meta: GraphMeta, **fields: Any) -> LoadedGraph:
    """A DGLGraph as a loaded one with further fields. The edge data get the order of A's CSR."""
    row_pointers, columns, edge_ids = graph.adj_tensors("csc")
    in_order = {key: values[edge_ids] if len(edge_ids) else values for key, values in graph.edata.items()}
    arrays = {"node_data": dict(graph.ndata), "edge_data": in_order, "graph_sizes": graph.batch_num_nodes().long()}
    return LoadedGraph(meta=meta, row_pointers=row_pointers, columns=columns, **arrays, **fields)

"""Rows of the simulator: sizes, bytes and predicted times of graphs on several GPUs. Nothing here is measured."""

from collections.abc import Iterator
from typing import Any

from bench.records import Provenance, Row
from configs.bench_schema import Shape
from configs.scaling_schema import ScalingConfig
from parallel.cost_model import SCHEMES, Link
from report.predicted_scaling import UPPER_BOUND
from simulator.fit import BACKEND
from simulator.sizes import GraphSize
from simulator.times import Machine, Prediction, bytes_of, peer_bytes, predict, predict_one

ONE_RANK = "none"  # scheme and link of one rank


class RowMaker:
    """Rows of one run.

    Args:
        environment: of this process, with the device that is predicted for.
        config: file of the configuration.
    """

    def __init__(self, settings: ScalingConfig, machine: Machine, environment: Provenance, config: str) -> None:
        self.settings, self.machine = settings, machine
        self.base = environment.model_dump() | {
            "bench": "scaling",
            "config": config,
            "config_sha": settings.sha(),
            "backend": BACKEND,
            "status": "predicted",
        }

    def of_inputs(self) -> Iterator[Row]:
        """What the predictions rest on: rates of the links with their sources, errors of the fits.

        Raises:
            NotRecordedError: a shape has too few recorded times.
        """
        for name, link in self.settings.links.items():
            common = {"scope": "machine", "link": name, "reason": f"an input, not measured: {link.source}"}
            yield self._row(**common, metric="bandwidth", unit="GB/s", value=link.gb_per_s)
            yield self._row(**common, metric="latency", unit="us", value=link.latency_us)
        for shape in self.settings.attention.head_shapes:
            fit = self.machine.attention(shape).fit
            common = {"scope": "kernel", "heads": shape.heads, "dim": shape.dim, "dtype": "float16"}
            common |= {"metric": "fit_error", "unit": "1", "graphs": fit.graphs}
            common["reason"] = f"each of {fit.graphs} recorded graphs, predicted from the others"
            yield self._row(**common, region="median", value=fit.median_error)
            yield self._row(**common, region="largest", value=max(fit.errors))

    def of_graph(self, graph: GraphSize) -> Iterator[Row]:
        """Sizes of a partition; bytes and times of all shapes, schemes and links."""
        for rank, part in enumerate(graph.parts):
            sizes = {"rows": part.rows, "edges": part.edges, "halo_rows": sum(part.halo)}
            for metric, value in sizes.items():
                common = {"scope": "build", "region": f"rank {rank}", "metric": metric, "unit": "1"}
                yield self._row(graph, **common, value=value)
        for shape in self.settings.attention.head_shapes:
            if graph.ranks == 1:
                found = predict_one(graph, shape, self.machine)
                yield from self._times(graph, shape, ONE_RANK, ONE_RANK, found)
                continue
            for scheme in SCHEMES:
                if scheme == "heads" and shape.heads < graph.ranks:
                    continue
                yield from self._bytes(graph, shape, scheme)
                yield from self._of_links(graph, shape, scheme)

    def _bytes(self, graph: GraphSize, shape: Shape, scheme: str) -> Iterator[Row]:
        found = {"rank": bytes_of(graph, scheme, shape).received, "peer": peer_bytes(graph, scheme, shape)}
        for where, values in found.items():
            common = self._settings(shape, scheme, ONE_RANK) | {"scope": "attention", "unit": "B"}
            common["metric"] = f"bytes_per_{where}"
            yield self._row(graph, **common, region="largest", value=max(values))
            yield self._row(graph, **common, region="mean", value=sum(values) / len(values))

    def _of_links(self, graph: GraphSize, shape: Shape, scheme: str) -> Iterator[Row]:
        for name, link in self.settings.links.items():
            if link.most_ranks is not None and graph.ranks > link.most_ranks:
                missing = self._settings(shape, scheme, name) | {"metric": "time", "unit": "ms", "scope": "attention"}
                missing |= {"status": "unsupported", "reason": f"{name} connects {link.most_ranks} ranks"}
                yield self._row(graph, **missing)
                continue
            rates = Link(name, 1e9 * link.gb_per_s, 1e-6 * link.latency_us)
            found = predict(graph, scheme, shape, rates, self.machine)
            yield from self._times(graph, shape, scheme, name, found)

    def _times(self, graph: GraphSize, shape: Shape, scheme: str, link: str, found: Prediction) -> Iterator[Row]:
        times = self.machine.attention(found.kernel)
        known = "scaled to its own recorded time" if graph.sha256 in times.anchors else "its own time is not recorded"
        common = self._settings(shape, scheme, link) | {"metric": "time", "unit": "ms"}
        common["reason"] = (
            f"{graph.basis}; kernels of {found.kernel} fitted to {times.fit.graphs} recorded graphs, {known}"
        )
        if found.is_bound:
            common["note"] = UPPER_BOUND
        yield self._row(graph, **common, scope="attention", value=found.attention)
        for region, value in found.parts.items():
            yield self._row(graph, **common, scope="attention", region=region, value=value)
        if found.block is not None:
            yield self._row(graph, **common, scope="model", region="block", value=found.block)

    def _settings(self, shape: Shape, scheme: str, link: str) -> dict[str, Any]:
        return {
            "dim": shape.dim,
            "heads": shape.heads,
            "blocks": 1,
            "dtype": "float16",
            "out_dtype": "float16",
            "dense": "fused",
            "variant": scheme,
            "link": link,
        }

    def _row(self, graph: GraphSize | None = None, **columns: Any) -> Row:
        found = dict(self.base)
        if graph is not None:
            found |= {
                "dataset": graph.dataset,
                "data_sha256": graph.sha256,
                "data_source": graph.source,
                "nodes": graph.nodes,
                "nnz": graph.edges,
                "graphs": 1,
                "ranks": graph.ranks,
                "order": graph.partition,
                "reason": graph.basis,
            }
        return Row(**(found | columns))

"""Programs to copy from, one a file: docs/examples.md. A package, so that `bench.doors` measures what they show."""

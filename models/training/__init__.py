"""Training of the Graph Transformer: `for epoch in Trainer(config, loaded, folder, seed=0).run(): ...`.

Node tasks train on one graph, graph tasks on batches of graphs. Weights and optimiser state are float32; the layers
run in the precision of the configuration (`training.precision`). On one machine a seed always gives the same weights,
also after a kill and a resume.
"""

from models.training.errors import TrainingError
from models.training.loop import EpochRecord, Trainer, TrainResult

__all__ = ["EpochRecord", "TrainResult", "Trainer", "TrainingError"]

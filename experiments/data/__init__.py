"""The data sets of the experiments, read from the layouts in which they are published; one module each.

Every loader takes the data folder that `data_dir` finds, and raises `DataError` for what is missing or damaged.
"""

from experiments.data.source import DataError, Images, data_dir

__all__ = ["DataError", "Images", "data_dir"]

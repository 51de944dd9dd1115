"""Text that people write: files, YAML with positions, sizes, and near spellings."""

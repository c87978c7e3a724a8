"""From run files to sentences, tables, figures, notebooks and pages."""

"""What submitter and worker must agree on: formats, layout, storage and errors. Imports neither of them."""

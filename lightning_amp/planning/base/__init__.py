"""The plan of any module before its step is counted: the request, the mesh, the rules of the data axis."""

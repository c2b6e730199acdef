"""What a disk may hold after a power cut, from a record made by powercut.c.

The model is what POSIX promises and no more. Data of a file is durable after fsync or fdatasync of it, or when written
through a descriptor with O_DSYNC; the names in a folder are durable after fsync of the folder, whichever file was synced.
Of everything else any part may have reached the disk: writes in pieces of 4096 bytes, sizes and names each for itself,
applied in order. One rename is one change, never half of it.
"""
import os
import pathlib
import struct

(CREATE, MKDIR, WRITE, SIZE, SYNC, SYNC_ALL, RENAME, UNLINK, LINK, SYMLINK, MAPPED, SAID) = range(1, 13)
NAMES = dict(enumerate("create mkdir write size sync sync_all rename unlink link symlink mapped said".split(), 1))
DURABLE, EXCHANGE = 1, 2
MAGIC = 0x31747563726577
HEADER = struct.Struct("<QQQQQ3Q")
RECORD = struct.Struct("<IIIIQqIIQ")
PIECE = 4096
COUNTED = {CREATE, MKDIR, WRITE, SIZE, SYNC, SYNC_ALL, RENAME, UNLINK, LINK, SYMLINK}


def log_create(path):
    """An empty log, to be named in POWERCUT_LOG."""
    pathlib.Path(path).write_bytes(HEADER.pack(MAGIC, 0, HEADER.size, 0, 0, 0, 0, 0))


class Record:
    """One recorded call."""

    def __init__(self, raw, at):
        (self.op, self.flags, self.pid, path_bytes, self.inode, self.offset, path2_bytes, _,
         data_bytes) = RECORD.unpack_from(raw, at)
        at += RECORD.size
        self.path = raw[at:at + path_bytes].decode("utf-8", "surrogateescape")
        at += path_bytes
        self.path2 = raw[at:at + path2_bytes].decode("utf-8", "surrogateescape")
        at += path2_bytes
        self.data = raw[at:at + data_bytes]
        self.end = at + data_bytes

    def __str__(self):
        parts = [NAMES[self.op], f"inode={self.inode}", f"offset={self.offset}", f"bytes={len(self.data)}"]
        return " ".join(parts + [os.path.basename(p) for p in (self.path, self.path2) if p])


def log_read(path):
    raw = pathlib.Path(path).read_bytes()
    magic, _, end, *_ = HEADER.unpack_from(raw, 0)
    if magic != MAGIC or end > len(raw):
        raise ValueError(f"{path}: not a log of powercut")
    records, at = [], HEADER.size
    while at < end:
        records.append(Record(raw, at))
        at = records[-1].end
    return records


class Node:
    """A file, folder or link: what was durable at the start, and every change since, each with a durable mark."""

    def __init__(self, kind, mode, content=b""):
        self.kind, self.mode = kind, mode
        self.base = bytes(content)
        self.changes = []  # [durable, offset, data] or [durable, size, None]
        self.entries = {}  # folders: name -> Node, as the running program sees it
        self.mapped = False

    def content(self, chosen):
        """The bytes with the durable changes and those that chosen(change, piece) accepts."""
        data = bytearray(self.base)
        for change in self.changes:
            durable, at, piece_data = change
            if piece_data is None:
                if durable or chosen(change, 0):
                    data[at:] = b"\0" * max(0, at - len(data))
                continue
            start = 0
            while start < len(piece_data):
                stop = min(len(piece_data), (at + start) // PIECE * PIECE + PIECE - at)
                if durable or chosen(change, start):
                    if len(data) < at + start:
                        data.extend(b"\0" * (at + start - len(data)))
                    data[at + start:at + stop] = piece_data[start:stop]
                start = stop
        return bytes(data)


class Disk:
    """A folder and the changes a program made to it."""

    def __init__(self, folder):
        """The folder as it is now is taken to be durable."""
        self.root_path = os.path.realpath(folder)
        self.by_inode = {}
        self.root = self._load(pathlib.Path(self.root_path))
        self.base_entries = self._entries_of(self.root)
        self.name_changes = []  # [durable, [(folder, name, Node or None, expected Node or None)]]

    def _load(self, path):
        st = path.lstat()
        if path.is_symlink():
            node = Node("link", 0o777, os.fsencode(os.readlink(path)))
        elif path.is_dir():
            node = Node("dir", st.st_mode & 0o7777)
            node.entries = {child.name: self._load(child) for child in sorted(path.iterdir())}
        else:
            node = Node("file", st.st_mode & 0o7777, path.read_bytes())
        self.by_inode[st.st_ino] = node
        return node

    def _entries_of(self, root):
        table = {root: dict(root.entries)}
        for child in root.entries.values():
            if child.kind == "dir":
                table.update(self._entries_of(child))
        return table

    def _find(self, path):
        """(folder node, last name) of an absolute path below the root, as the program sees it now."""
        parts = [p for p in os.path.relpath(path, self.root_path).split(os.sep) if p != "."]
        folder = self.root
        for part in parts[:-1]:
            folder = folder.entries[part]
        return folder, parts[-1] if parts else ""

    def _rename_entries(self, assignments):
        self.name_changes.append([False, assignments])
        for folder, name, node, expected in assignments:
            self._assign(folder.entries, name, node, expected)

    @staticmethod
    def _assign(entries, name, node, expected):
        if node is not None:
            entries[name] = node
        elif expected is None or entries.get(name) is expected:
            entries.pop(name, None)

    def apply(self, record):
        """Takes one recorded call into account."""
        op = record.op
        if op in (CREATE, MKDIR, SYMLINK):
            kind = {CREATE: "file", MKDIR: "dir", SYMLINK: "link"}[op]
            node = Node(kind, record.offset if op != SYMLINK else 0o777, record.data if op == SYMLINK else b"")
            self.by_inode[record.inode] = node
            if record.path:
                folder, name = self._find(record.path)
                self._rename_entries([(folder, name, node, None)])
        elif op == LINK:
            folder, name = self._find(record.path2)
            self._rename_entries([(folder, name, self.by_inode[record.inode], None)])
        elif op == WRITE:
            durable = bool(record.flags & DURABLE)
            self.by_inode[record.inode].changes.append([durable, record.offset, record.data])
        elif op == SIZE:
            self.by_inode[record.inode].changes.append([False, record.offset, None])
        elif op == SYNC:
            self._sync(self.by_inode[record.inode])
        elif op == SYNC_ALL:
            for node in list(self.by_inode.values()):
                self._sync(node)
        elif op == UNLINK:
            folder, name = self._find(record.path)
            self._rename_entries([(folder, name, None, folder.entries.get(name))])
        elif op == RENAME:
            folder, name = self._find(record.path)
            folder2, name2 = self._find(record.path2)
            node = folder.entries[name]
            if record.flags & EXCHANGE:
                other = folder2.entries[name2]
                self._rename_entries([(folder2, name2, node, None), (folder, name, other, None)])
            else:
                self._rename_entries([(folder2, name2, node, None), (folder, name, None, node)])
        elif op == MAPPED:
            self.by_inode[record.inode].mapped = True

    def _sync(self, node):
        for change in node.changes:
            change[0] = True
        if node.kind == "dir":
            for change in self.name_changes:
                if any(folder is node for folder, *_ in change[1]):
                    change[0] = True

    def rebuild(self, target, chosen_data, chosen_name):
        """Writes the folder that a cut now would leave; the callbacks say which changes that are not durable survive."""
        table = {folder: dict(entries) for folder, entries in self.base_entries.items()}
        for change in self.name_changes:
            if change[0] or chosen_name(change):
                for folder, name, node, expected in change[1]:
                    self._assign(table.setdefault(folder, {}), name, node, expected)
        self._write(self.root, pathlib.Path(target), table, chosen_data, set())

    def _write(self, node, path, table, chosen, above):
        if node.kind == "link":
            os.symlink(node.content(chosen), os.fsencode(path))
        elif node.kind == "file":
            path.write_bytes(node.content(chosen))
            os.chmod(path, node.mode)
        elif node not in above:
            path.mkdir(exist_ok=True)
            for name, child in table.get(node, {}).items():
                self._write(child, path / name, table, chosen, above | {node})
            os.chmod(path, node.mode)

    def unrecorded(self, real):
        """How the real folder differs from the replayed one: what the program did behind the record's back."""
        differences = []

        def compare(node, path):
            if node.kind == "dir":
                names = {p.name for p in path.iterdir()} if path.is_dir() else None
                if names != set(node.entries):
                    differences.append(f"{path}: {names} on disk, {set(node.entries)} recorded")
                    return
                for name, child in node.entries.items():
                    compare(child, path / name)
            elif node.kind == "file" and not node.mapped:
                if not path.is_file() or path.read_bytes() != node.content(lambda *_: True):
                    differences.append(f"{path}: other content than recorded")
        compare(self.root, pathlib.Path(real))
        return differences


def all_lost(*_):
    """Nothing that was not made durable survives."""
    return False


def all_kept(*_):
    """Everything survives, as after kill -9."""
    return True


def some(random, share):
    """Each change survives with the given probability; asked again about the same change and piece, the same answer."""
    answers = {}

    def chosen(change, piece=0):
        key = (id(change), piece)
        if key not in answers:
            answers[key] = random.random() < share
        return answers[key]
    return chosen

//! What ARCHITECTURE.md, README.md and module heads say of the whole tree, looked up in it.
//!
//! In: the texts of the tree. Out: a line for each place where it is not so. Checks read words, not types: they see what
//! a file names, not what it means. Test modules and comments do not count. Exceptions stand in tables here, each with
//! its reason, and one that is no longer needed is a fault too.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fs, io};

/// Checks the tree at `root`.
pub fn check(root: &Path) -> Result<(), String> {
    let tree = Tree::read(root).map_err(|e| e.to_string())?;
    let checks = [arrows, absences, operations, uses, variables, unsafety];
    let faults: Vec<String> = checks.iter().flat_map(|check| check(&tree)).collect();
    if faults.is_empty() { Ok(()) } else { Err(format!("not as it is said:\n  {}", faults.join("\n  "))) }
}

/// Texts by their path below the root.
struct Tree(Vec<(String, String)>);

impl Tree {
    fn read(root: &Path) -> io::Result<Tree> {
        let mut files = Vec::new();
        for place in ["", "crates", "checks", "examples", "xtask", "docs", ".ci"] {
            walk(root, &root.join(place), !place.is_empty(), &mut files)?;
        }
        files.sort();
        Ok(Tree(files))
    }

    fn text(&self, path: &str) -> &str {
        self.0.iter().find(|file| file.0 == path).map_or("", |file| &file.1)
    }

    /// Rust sources at `place`, a file or a folder, without tests and benches.
    fn sources<'a>(&'a self, place: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let all = self.0.iter().map(|(path, text)| (path.as_str(), text.as_str()));
        all.filter(move |(path, _)| below(path, place) && path.ends_with(".rs") && !is_test(path))
    }

    /// The manifest and the folder of each crate.
    fn crates(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().filter_map(|(path, text)| {
            let folder = path.strip_suffix("/Cargo.toml")?;
            let own = folder == "xtask" || !folder.starts_with("examples") && folder.contains('/');
            own.then_some((folder, text.as_str()))
        })
    }
}

fn walk(root: &Path, at: &Path, deep: bool, files: &mut Vec<(String, String)>) -> io::Result<()> {
    for entry in fs::read_dir(at)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if deep && name != "target" {
                walk(root, &path, deep, files)?;
            }
            continue;
        }
        if [".rs", ".md", ".toml", ".sh"].iter().any(|end| name.ends_with(end)) || name == "run" {
            let short = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().replace('\\', "/");
            files.push((short, fs::read_to_string(&path)?));
        }
    }
    Ok(())
}

fn below(path: &str, place: &str) -> bool {
    path.strip_prefix(place).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn is_test(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.split('/').any(|part| part == "tests" || part == "benches")
}

/// The lines of a source that are not comments and not in its test module, with their numbers.
fn code(text: &str) -> Vec<(usize, &str)> {
    let mut lines = text.lines().enumerate().map(|(at, line)| (at + 1, line));
    let mut out = Vec::new();
    while let Some((at, line)) = lines.next() {
        if line.trim() == "#[cfg(test)]" {
            // To the end of what it stands before: its closing line has the same indentation.
            let indent = line.len() - line.trim_start().len();
            let ends = |line: &str| {
                line.len() > indent
                    && !line[indent..].starts_with([' ', '#', '/'])
                    && line.ends_with(['}', ';'])
            };
            lines.by_ref().find(|(_, line)| ends(line));
        } else {
            let line = line.split_once(" // ").map_or(line, |(line, _)| line);
            if !line.trim_start().starts_with("//") {
                out.push((at, line));
            }
        }
    }
    out
}

/// Whether `word` stands in a line by itself, not as a part of another word.
fn names(line: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        !line[..at].chars().next_back().is_some_and(part)
            && !line[at + word.len()..].chars().next().is_some_and(part)
    })
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The crates that a crate depends on are those that ARCHITECTURE.md's table says, development apart.
fn arrows(tree: &Tree) -> Vec<String> {
    let mut faults = Vec::new();
    let mut said: Vec<(&str, BTreeSet<&str>)> = Vec::new();
    let table = tree.text("ARCHITECTURE.md").split("| crate | holds | depends on |").nth(1).unwrap_or("");
    for row in table.lines().skip(2).take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.split('|').collect();
        if let (Some(name), [_, .., on, _]) = (quoted(row).next(), &cells[..]) {
            said.push((name, quoted(on).collect()));
        }
    }
    for (folder, manifest) in tree.crates() {
        let name = folder.strip_prefix("crates/").unwrap_or(folder);
        let are = dependencies(manifest);
        match said.iter().find(|row| row.0 == name) {
            None => faults.push(format!("ARCHITECTURE.md has no row for `{name}`")),
            Some((_, said)) => {
                let fault = |which: &str| format!("ARCHITECTURE.md: `{name}` {which}");
                faults.extend(are.difference(said).map(|on| fault(&format!("depends on `{on}` too"))));
                faults.extend(said.difference(&are).map(|on| fault(&format!("does not depend on `{on}`"))));
            }
        }
    }
    faults
}

/// The crates of the workspace that a manifest names, without those for development only.
fn dependencies(manifest: &str) -> BTreeSet<&str> {
    let (mut inside, mut on) = (false, BTreeSet::new());
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line.ends_with("dependencies]") && !line.contains("dev-dependencies");
        } else if inside && line.starts_with("kiln") {
            let name = line.split([' ', '.', '=']).next().unwrap_or("");
            on.insert(name.strip_prefix("kiln-").unwrap_or(name));
        }
    }
    on
}

const CLOCK: &[&str] = &["Instant", "SystemTime"];
const SOCKET: &[&str] =
    &["std::net", "TcpStream", "TcpListener", "UnixStream", "UdpSocket", "mio", "tokio", "socket2"];
const THREAD: &[&str] = &["std::thread", "thread::spawn", "thread::Builder", "Condvar"];
const FILE: &[&str] =
    &["std::fs", "File::open", "File::create", "OpenOptions", "std::env", "println!", "eprintln!"];

/// What is absent where.
const ABSENT: &[(&str, &[&[&str]])] = &[
    // The waist and the rules of derivatives: no IO of any kind.
    ("crates/ir/src", &[CLOCK, SOCKET, THREAD, FILE]),
    ("crates/grad/src", &[CLOCK, SOCKET, THREAD, FILE]),
    // The protocol and both sides' sessions: bytes and time come in, actions go out.
    ("crates/remote/src/protocol", &[CLOCK, SOCKET, THREAD, FILE]),
    ("crates/remote/src/client/core.rs", &[CLOCK, SOCKET, THREAD, FILE]),
    ("crates/remote/src/client/core", &[CLOCK, SOCKET, THREAD, FILE]),
    ("crates/remote/src/client/journal.rs", &[CLOCK, SOCKET, THREAD, FILE]),
    ("crates/remote/src/server/session.rs", &[CLOCK, SOCKET, THREAD, FILE]),
    // What ranks agree on, and the one tree.
    ("crates/group/src/layout.rs", &[CLOCK, SOCKET, THREAD, FILE]),
    ("crates/group/src/reduce.rs", &[CLOCK, SOCKET, THREAD, FILE]),
    ("crates/group/src/reduce", &[CLOCK, SOCKET, THREAD, FILE]),
    // Fusion knows no device; its store has files of its own.
    ("crates/fuse/src/search.rs", &[CLOCK, SOCKET, THREAD, FILE]),
    ("crates/fuse/src/arrange.rs", &[CLOCK, SOCKET, THREAD, FILE]),
    ("crates/fuse/src/window.rs", &[CLOCK, SOCKET, THREAD, FILE]),
    ("crates/fuse/src/plan.rs", &[CLOCK, SOCKET, THREAD, FILE]),
    // The shell of a device knows no machine; what decides on blocks has no lock and no memory.
    ("crates/host/src", &[SOCKET]),
    ("crates/host/src/blocks.rs", &[CLOCK, SOCKET, THREAD, FILE, &["Mutex", "RwLock"]]),
    // Tensors meet the network through a device only, layers through nothing.
    ("crates/tensor/src", &[SOCKET]),
    ("crates/nn/src", &[CLOCK, SOCKET, THREAD]),
    // Data sets are never downloaded, and no clock decides what is loaded.
    ("crates/data/src", &[CLOCK, SOCKET]),
    ("crates/store/src", &[CLOCK, SOCKET, THREAD]),
    ("crates/store/src/pickle.rs", &[CLOCK, SOCKET, THREAD, FILE]),
];

/// What module heads and ARCHITECTURE.md say that a file does without, it does without.
fn absences(tree: &Tree) -> Vec<String> {
    let mut faults = Vec::new();
    for (place, sets) in ABSENT {
        let mut sources = tree.sources(place).peekable();
        if sources.peek().is_none() {
            faults.push(format!("{place} is not there, but has absences to check"));
        }
        for (path, text) in sources {
            for (at, line) in code(text) {
                let words = sets.iter().flat_map(|set| set.iter()).filter(|word| names(line, word));
                faults.extend(words.map(|word| format!("{path}:{at} names `{word}`")));
            }
        }
    }
    // A row of the tables has its value taken out in one place.
    for (path, text) in tree.sources("crates") {
        let home = ["crates/ir/src/table.rs", "crates/ir/src/math/row.rs"].contains(&path);
        let other = code(text).into_iter().find(|(_, line)| !home && line.contains("value: |$"));
        faults.extend(other.map(|(at, _)| format!("{path}:{at} takes the tables' value column")));
    }
    faults
}

/// The enums of the IR whose variants are operations.
const OPERATIONS: &[&str] = &["Op", "Move", "Named", "Unary", "Binary"];

/// Where no operation is named: what hands batches on, plans them, sends them or walks back over them.
const GENERIC: &[&str] = &[
    "crates/device/src",
    "crates/fuse/src",
    "crates/host/src",
    "crates/remote/src",
    "crates/tensor/src/lane.rs",
    "crates/tensor/src/tape.rs",
];

/// The operations that are named there all the same, and why.
const EXCEPTIONS: &[(&str, &[&str], &str)] = &[
    (
        "crates/fuse/src/window.rs",
        &["Op::Custom"],
        "a custom operation alone says itself how many results it has",
    ),
    (
        "crates/fuse/src/moved.rs",
        &[
            "Op::Move",
            "Move::Reshape",
            "Move::Permute",
            "Move::Expand",
            "Move::Slice",
            "Move::Assign",
            "Move::Flip",
            "Move::Cat",
        ],
        "which moves are views decides how many bytes are moved",
    ),
    (
        "crates/fuse/src/recompute.rs",
        &["Op::Unary", "Op::Binary", "Op::Select", "Op::Commit", "Op::Cast", "Op::Full"],
        "what is elementwise may be computed again where it is used",
    ),
    (
        "crates/host/src/lowering.rs",
        &["Op::Named", "Op::Custom", "Op::Cast"],
        "composites are written as primitives here",
    ),
    (
        "crates/host/src/execute.rs",
        &["Op::Guard", "Op::Commit", "Op::Full"],
        "these two take a failure as a fact",
    ),
    (
        "crates/remote/src/server/executor.rs",
        &["Op::Guard", "Op::Commit", "Op::Full", "Op::Cast"],
        "these two take a failure as a fact",
    ),
    (
        "crates/remote/src/client/core.rs",
        &["Op::Custom"],
        "a server is asked whether it has a custom operation",
    ),
    (
        "crates/tensor/src/tape.rs",
        &["Op::Unary", "Op::Binary", "Op::Select"],
        "the shortest way for the commonest classes",
    ),
];

/// Decorators, fusion, the shell, the wire and the graph name no operation but those of the table.
fn operations(tree: &Tree) -> Vec<String> {
    let mut faults = Vec::new();
    for (path, text) in GENERIC.iter().flat_map(|place| tree.sources(place)) {
        let listed = EXCEPTIONS.iter().find(|row| row.0 == path).map_or(&[][..], |row| row.1);
        let mut met = BTreeSet::new();
        for (at, line) in code(text) {
            for name in variants(line) {
                if !listed.contains(&name) {
                    faults.push(format!("{path}:{at} names `{name}`"));
                }
                met.insert(name);
            }
        }
        let unmet = listed.iter().filter(|name| !met.contains(*name));
        faults.extend(unmet.map(|name| format!("{path} no longer names `{name}`: its exception can go")));
    }
    let gone = EXCEPTIONS.iter().filter(|row| tree.text(row.0).is_empty());
    faults.extend(gone.map(|row| format!("{} is not there, but has an exception", row.0)));
    faults
}

/// The `Enum::Variant` of operations in a line.
fn variants(line: &str) -> impl Iterator<Item = &str> {
    let words = line.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
    words.filter(|word| {
        let (of, variant) = word.rsplit_once("::").unwrap_or_default();
        let is_variant = variant.starts_with(char::is_uppercase) && variant.contains(char::is_lowercase);
        is_variant && OPERATIONS.contains(&of)
    })
}

/// Each structured operation is recorded by a method or by a rule of derivatives.
fn uses(tree: &Tree) -> Vec<String> {
    let list = tree.text("crates/ir/src/op/list.rs");
    let users = ["crates/tensor/src", "crates/grad/src", "crates/ir/src/expr.rs"];
    let text: Vec<&str> =
        users.iter().flat_map(|place| tree.sources(place)).flat_map(|(_, text)| text.lines()).collect();
    let mut faults = Vec::new();
    for (_, line) in code(list) {
        let Some((name, rest)) = line.trim().strip_prefix('"').and_then(|rest| rest.split_once('"')) else {
            continue;
        };
        let variant = rest.split(|c: char| !c.is_alphanumeric() && c != ':').rfind(|word| {
            word.split_once("::").is_some_and(|(of, _)| of.ends_with("Kind") || OPERATIONS.contains(&of))
        });
        if let Some(variant) = variant
            && !text.iter().any(|line| names(line, variant))
        {
            faults.push(format!("no method and no rule of derivatives records `{name}` ({variant})"));
        }
    }
    faults
}

/// Each `KILN_*` variable is read in `kiln-env` alone and documented in README's table, which lists no other.
fn variables(tree: &Tree) -> Vec<String> {
    let mut faults = Vec::new();
    let known: BTreeSet<&str> = kiln_env::NAMES.iter().copied().collect();
    let table = tree.text("README.md").split("| variable | effect |").nth(1).unwrap_or("");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let said: BTreeSet<&str> = rows.filter_map(|row| row.split('|').nth(1)).flat_map(kiln_names).collect();
    faults.extend(known.difference(&said).map(|name| format!("README.md does not say what {name} does")));
    faults.extend(said.difference(&known).map(|name| format!("README.md lists {name}, which nobody reads")));
    for (path, text) in &tree.0 {
        for (at, line) in text.lines().enumerate() {
            // What a test or benchmark tells the processes that it starts is its own.
            let own = |name: &str| {
                is_test(path) && ["KILN_TEST_", "KILN_BENCH_"].iter().any(|own| name.starts_with(own))
            };
            let unknown = kiln_names(line).filter(|name| !known.contains(name) && !own(name));
            faults.extend(unknown.map(|name| format!("{path}:{} names {name}, which nobody reads", at + 1)));
        }
    }
    for (path, text) in ["crates", "checks"].iter().flat_map(|place| tree.sources(place)) {
        if path == "crates/env/src/lib.rs" {
            continue;
        }
        let reads = |line: &str| line.contains("env::var") && line.contains("KILN");
        let found = code(text).into_iter().find(|(_, line)| reads(line));
        faults.extend(found.map(|(at, _)| format!("{path}:{at} reads a variable past kiln-env")));
    }
    faults
}

/// The names of variables in a line.
fn kiln_names(line: &str) -> impl Iterator<Item = &str> {
    let words = line.split(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_');
    words.filter(|word| word.starts_with("KILN_") && !word.ends_with('_'))
}

/// `unsafe` lies in the crates that ARCHITECTURE.md lists; every other crate forbids it.
fn unsafety(tree: &Tree) -> Vec<String> {
    let text = tree.text("ARCHITECTURE.md");
    let line = text.lines().find(|line| line.starts_with("- `unsafe` lies in ")).unwrap_or("");
    let may: BTreeSet<&str> = quoted(line).skip(1).collect();
    let mut faults = Vec::new();
    if may.is_empty() {
        faults.push("ARCHITECTURE.md does not say where `unsafe` lies".into());
    }
    for (folder, _) in tree.crates() {
        let name = folder.strip_prefix("crates/").unwrap_or(folder);
        let sources = format!("{folder}/src");
        let has =
            tree.sources(&sources).any(|(_, text)| code(text).iter().any(|(_, line)| names(line, "unsafe")));
        if may.contains(name) {
            if !has {
                faults.push(format!("ARCHITECTURE.md: there is no `unsafe` in `{name}`"));
            }
            continue;
        }
        for root in ["lib.rs", "main.rs"].map(|file| format!("{sources}/{file}")) {
            let text = tree.text(&root);
            // A crate that builds another's files cannot forbid what they do.
            let borrows = text.contains("\n#[path = ");
            if !text.is_empty() && !borrows && !text.contains("#![forbid(unsafe_code)]") {
                faults.push(format!("{root} does not forbid `unsafe`"));
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests;

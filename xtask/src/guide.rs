//! Follows CONTRIBUTING.md's page "add an operation" literally: in a copy of the tree, inserts its table line, adds its
//! test, and runs that test and the walking suite. The page can then not be wrong.

use crate::{cargo, root, step};
use std::path::Path;
use std::{fs, io};

const TABLE: &str = "crates/ir/src/table.rs";
const HEAD: &str = "macro_rules! unary_table {";

pub fn follow() -> Result<(), String> {
    let guide =
        fs::read_to_string(root().join("CONTRIBUTING.md")).map_err(|e| format!("CONTRIBUTING.md: {e}"))?;
    let line = block(&guide, "<!-- table line -->")?;
    let test = block(&guide, "<!-- table test -->")?;
    if line.lines().count() != 1 {
        return Err("CONTRIBUTING.md: an elementwise operation should be one line".into());
    }
    let copy = root().join("target/guide");
    let write = || -> io::Result<()> {
        for part in
            ["Cargo.toml", "Cargo.lock", "crates", "checks", "xtask", "examples", "README.md", ".cargo"]
        {
            mirror(&root().join(part), &copy.join(part))?;
        }
        let table = fs::read_to_string(copy.join(TABLE))?;
        let at = table.find(HEAD).and_then(|at| table[at..].find('\n').map(|end| at + end + 1));
        let at = at.ok_or_else(|| io::Error::other("the unary table is not where it was"))?;
        fs::write(copy.join(TABLE), format!("{}{line}{}", &table[..at], &table[at..]))?;
        fs::write(copy.join("crates/tensor/tests/added.rs"), test)
    };
    write().map_err(|e| format!("guide: {e}"))?;
    // The same target folder: dependencies are built already.
    let run = |args: &str| {
        let mut command = cargo(args);
        command.current_dir(&copy).env("CARGO_TARGET_DIR", root().join("target"));
        step("guide", command)
    };
    run("test -p kiln-tensor --test added")?;
    run("test -p kiln-conform --test toy")
}

/// The content of the fenced block after `mark`.
fn block(text: &str, mark: &str) -> Result<String, String> {
    let after = text.split_once(mark).map(|(_, after)| after);
    let body = after.and_then(|a| a.split_once("```rust\n")).and_then(|(_, body)| body.split_once("```"));
    body.map(|(body, _)| body.to_string()).ok_or_else(|| format!("CONTRIBUTING.md: no block after {mark}"))
}

/// Makes `to` like `from`. Files that are the same keep their time, so that nothing is built twice.
fn mirror(from: &Path, to: &Path) -> io::Result<()> {
    if !from.is_dir() {
        let content = fs::read(from)?;
        if fs::read(to).is_ok_and(|old| old == content) {
            return Ok(());
        }
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder)?;
        }
        return fs::write(to, content);
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(to)?.flatten() {
        if !from.join(entry.file_name()).exists() && entry.path().is_file() {
            fs::remove_file(entry.path())?;
        }
    }
    for entry in fs::read_dir(from)?.flatten() {
        mirror(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

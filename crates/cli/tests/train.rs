//! `kiln train` and `kiln bench` as a shell sees them: what is refused, when, and what a reader that goes away does.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

fn kiln(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    command.args(args).env_remove("KILN_DEVICE");
    command
}

fn run(args: &[&str]) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = kiln(args).output().unwrap();
    (status.code(), String::from_utf8_lossy(&stderr).into_owned())
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("kiln-train-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

#[test]
fn a_benchmark_that_does_not_exist_is_an_error_that_names_those_that_do() {
    for only in [&["nothing"][..], &["matmul", "nothing"]] {
        let (code, text) = run(&[&["bench", "--list", "--only"], only].concat());
        assert!(code == Some(1) && text.contains("`nothing`") && text.contains("known are"), "{text}");
    }
}

#[test]
fn numbers_that_make_no_sense_are_usage_errors() {
    for option in ["--every", "--keep"] {
        let (code, text) = run(&["train", "digits", "--checkpoint", "/tmp/kiln-never", option, "0"]);
        assert!(code == Some(2) && text.contains(option), "{code:?} {text}");
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_found_out_before_the_first_step() {
    // Below a file there is no folder, whoever asks.
    let file = folder("file");
    std::fs::write(&file, "").unwrap();
    let below = file.join("checkpoints");
    let (code, text) =
        run(&["train", "digits", "--steps", "100000000", "--checkpoint", &below.to_string_lossy()]);
    assert!(code == Some(1) && text.contains(&*below.to_string_lossy()), "{code:?} {text}");
    assert!(!text.contains("step "), "{text}");
    std::fs::remove_file(file).unwrap();
}

#[test]
fn checkpoints_stay_unless_a_number_to_keep_is_given() {
    let steps = |keep: &[&str]| -> Vec<String> {
        let folder = folder("keep");
        let path = folder.to_string_lossy().into_owned();
        let args = ["train", "digits", "--steps", "4", "--every", "1", "--checkpoint", &path];
        let (code, text) = run(&[&args, keep].concat());
        assert_eq!(code, Some(0), "{text}");
        let name = |e: std::io::Result<std::fs::DirEntry>| e.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<String> = std::fs::read_dir(&folder).unwrap().map(name).collect();
        names.sort();
        std::fs::remove_dir_all(folder).unwrap();
        names
    };
    let name = |step: u64| format!("step-{step:010}.safetensors");
    assert_eq!(steps(&[]), [1, 2, 3, 4].map(name));
    assert_eq!(steps(&["--keep", "2"]), [3, 4].map(name));
}

#[cfg(unix)]
#[test]
fn a_reader_of_both_outputs_that_goes_away_ends_the_program_quietly() {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut command = kiln(&["train", "digits", "--steps", "4000"]);
    let mut child =
        command.stdout(writer.try_clone().unwrap()).stderr(writer).stdin(Stdio::null()).spawn().unwrap();
    drop(command);
    let mut line = String::new();
    BufReader::new(reader).read_line(&mut line).unwrap();
    assert!(line.starts_with("training "), "{line}");
    // The reader is gone: the next progress line has nowhere to go. 141 is what a shell calls the signal.
    assert_eq!(child.wait().unwrap().code(), Some(141));
}

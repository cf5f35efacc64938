//! The same collectives between MPI ranks: this program starts itself under `mpirun`.
#![cfg(feature = "mpi")]

mod common;
use common::{config, digest, expected};
use kiln_group::{Error, Group, Identity, Reduce, Rendezvous};
use kiln_ir::DType;
use std::process::Command;

/// The body of the ranks; does nothing when run as a test.
#[test]
fn child() {
    let Ok(scene) = std::env::var("KILN_TEST_SCENE") else { return };
    let at = Rendezvous::from_env().unwrap().expect("started as a rank");
    let model = if scene == "refuse" && at.rank == 1 { "n" } else { "m" };
    let group = match Group::join(&at, Identity::new(model, "f32", "1"), config(8)) {
        Ok(group) => group,
        Err(error) => return println!("\nANSWER {error}"),
    };
    assert_eq!(group.engine(), "mpi");
    match scene.as_str() {
        "digest" => {
            let sub = group.subgroup("all", &(0..at.world).collect::<Vec<_>>(), None).unwrap();
            sub.barrier().unwrap();
            println!("\nANSWER {}", digest(&group).unwrap());
            group.barrier().unwrap();
        }
        "mismatch" => {
            let dtype = if at.rank == 1 { DType::I32 } else { DType::F32 };
            let error = group.all_reduce(Reduce::Sum, dtype, group.buffer(1 << 20).unwrap()).unwrap().wait();
            assert!(matches!(error, Err(Error::Mismatch { .. })), "{error:?}");
            println!("\nANSWER mismatch");
        }
        other => panic!("no scene {other}"),
    }
}

fn run(world: usize, scene: &str) -> Vec<String> {
    let out = Command::new("timeout")
        .args(["60", "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", &world.to_string()])
        .arg(std::env::current_exe().unwrap())
        .args(["child", "--exact", "--nocapture", "--test-threads=1"])
        .env("KILN_TEST_SCENE", scene)
        .env("KILN_ENGINE", "mpi")
        .output()
        .expect("mpirun");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let answers: Vec<String> =
        text.lines().filter_map(|l| l.strip_prefix("ANSWER ")).map(String::from).collect();
    assert_eq!(answers.len(), world, "{text}\n{}", String::from_utf8_lossy(&out.stderr));
    answers
}

#[test]
fn mpi_ranks_give_the_bits_of_one_rank() {
    let want = expected().to_string();
    for world in [2, 3, 4] {
        assert_eq!(run(world, "digest"), vec![want.clone(); world]);
    }
}

#[test]
fn calls_that_differ_are_refused_under_mpi() {
    assert_eq!(run(2, "mismatch"), ["mismatch"; 2]);
}

#[test]
fn a_rank_that_differs_is_refused_under_mpi() {
    for answer in run(2, "refuse") {
        assert_eq!(answer, "rank 1 is refused: its model is n, the job's is m");
    }
}

//! Claiming, parking, waking and waiting of the compute pool.

use kiln_schedules::pool::{Pool, set_threads};
use shuttle::thread;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};

const SCHEDULES: usize = 2000;

/// Explores schedules of `jobs`, each with a pool of its own.
fn explore(schedules: usize, jobs: fn(&'static Pool)) {
    let run = move || {
        let pool: &'static Pool = Box::leak(Box::new(Pool::new()));
        jobs(pool);
        pool.close();
    };
    set_threads(3);
    shuttle::check_random(run, schedules);
    shuttle::check_pct(run, schedules, 3);
}

/// Runs `chunks` chunks, each of which must have run once when the call is over.
fn job(pool: &'static Pool, chunks: usize) {
    // Counted by the standard library's atomics: counting is no step of the schedule.
    let runs: Vec<AtomicU32> = (0..chunks).map(|_| AtomicU32::new(0)).collect();
    pool.parallel(chunks, &|chunk| {
        thread::yield_now();
        runs[chunk].fetch_add(1, Ordering::Relaxed);
    });
    let runs: Vec<u32> = runs.into_iter().map(AtomicU32::into_inner).collect();
    assert_eq!(runs, vec![1; chunks]);
}

#[test]
fn every_chunk_of_every_job_runs_once() {
    explore(SCHEDULES, |pool| [2, 5, 3].into_iter().for_each(|chunks| job(pool, chunks)));
}

#[test]
fn a_second_caller_runs_its_chunks_itself() {
    explore(SCHEDULES, |pool| {
        let other = thread::spawn(move || (0..2).for_each(|_| job(pool, 3)));
        (0..2).for_each(|_| job(pool, 4));
        other.join().unwrap();
    });
}

#[test]
fn a_job_inside_a_job_runs_inline() {
    explore(SCHEDULES, |pool| {
        pool.parallel(2, &|_| job(pool, 2));
        job(pool, 3);
    });
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
    // What is meant to panic does so without a word.
    let told = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !info.payload().is::<usize>() {
            told(info);
        }
    }));
    explore(SCHEDULES / 4, |pool| {
        let bad = || {
            pool.parallel(4, &|chunk| {
                if chunk == 2 {
                    std::panic::panic_any(chunk)
                }
            })
        };
        let panic = catch_unwind(AssertUnwindSafe(bad)).expect_err("a chunk panics");
        assert_eq!(panic.downcast_ref::<usize>(), Some(&2));
        job(pool, 3);
    });
}

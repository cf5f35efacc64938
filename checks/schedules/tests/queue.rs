//! Handing work over between those who record, those who wait and the background thread.

use kiln_schedules::queue::Queue;
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

const SCHEDULES: usize = 3000;

/// What was executed: who pushed it, and which of theirs it is.
type Log = Vec<(usize, usize)>;

struct Work {
    by: usize,
    number: usize,
    /// Told when it is done.
    answer: Option<Arc<(Mutex<bool>, Condvar)>>,
}

fn execute(log: &mut Log, work: Work) {
    thread::yield_now();
    log.push((work.by, work.number));
    if let Some(answer) = work.answer {
        *answer.0.lock().unwrap() = true;
        answer.1.notify_all();
    }
}

/// A queue with a background thread.
fn queue() -> Arc<Queue<Work, Log>> {
    let queue = Arc::new(Queue::new(Log::new()));
    let served = queue.clone();
    drop(thread::spawn(move || served.serve(&mut execute)));
    queue
}

fn push(queue: &Queue<Work, Log>, by: usize, number: usize) {
    queue.push(Work { by, number, answer: None }, 1);
}

/// Pushes work and waits for its answer without helping: only the background thread can give it.
fn ask(queue: &Queue<Work, Log>, by: usize, number: usize) {
    let answer = Arc::new((Mutex::new(false), Condvar::new()));
    queue.push(Work { by, number, answer: Some(answer.clone()) }, 1);
    queue.kick();
    let mut done = answer.0.lock().unwrap();
    while !*done {
        done = answer.1.wait(done).unwrap();
    }
}

/// Everybody's work is in the log once, in the order in which it was pushed.
fn check(queue: &Queue<Work, Log>, each: &[usize]) {
    let log = queue.executor();
    for (by, &count) in each.iter().enumerate() {
        let own: Vec<usize> = log.iter().filter(|w| w.0 == by).map(|w| w.1).collect();
        assert_eq!(own, (0..count).collect::<Vec<_>>(), "of {by}");
    }
}

#[test]
fn whoever_waits_finds_his_work_done() {
    let run = || {
        let queue = queue();
        let other = {
            let queue = queue.clone();
            thread::spawn(move || {
                for number in 0..3 {
                    push(&queue, 1, number);
                    queue.run(&mut execute);
                    assert!(queue.executor().contains(&(1, number)));
                }
            })
        };
        for number in 0..3 {
            push(&queue, 0, number);
            queue.kick();
        }
        queue.run(&mut execute);
        assert!(queue.executor().contains(&(0, 2)));
        other.join().unwrap();
        check(&queue, &[3, 3]);
        queue.stop();
    };
    shuttle::check_random(run, SCHEDULES);
    shuttle::check_pct(run, SCHEDULES, 3);
}

#[test]
fn no_kick_is_lost() {
    let run = || {
        let queue = queue();
        let others: Vec<_> = (1..3)
            .map(|by| {
                let queue = queue.clone();
                thread::spawn(move || (0..2).for_each(|number| ask(&queue, by, number)))
            })
            .collect();
        (0..2).for_each(|number| ask(&queue, 0, number));
        others.into_iter().for_each(|other| other.join().unwrap());
        check(&queue, &[2, 2, 2]);
        queue.stop();
    };
    shuttle::check_random(run, SCHEDULES);
    shuttle::check_pct(run, SCHEDULES, 3);
}

#[test]
fn a_stopped_queue_is_still_run_by_whoever_waits() {
    let run = || {
        let queue = queue();
        push(&queue, 0, 0);
        queue.kick();
        queue.stop();
        push(&queue, 0, 1);
        queue.run(&mut execute);
        check(&queue, &[2]);
    };
    shuttle::check_random(run, SCHEDULES);
}
